"""Reports as an engine host makes them, for tests that have no engine."""

from __future__ import annotations

from typing import Any

from serve_apps.messages import UnitReport


def report(unit: int = 0, **changes: Any) -> UnitReport:
    values: dict[str, Any] = {
        "unit": unit,
        "listening": True,
        "end_of_turn": False,
        "decision": "<|listen|>",
        "transcript": "",
        "response": "",
        "segment_closed_by": None,
        "residents": {"prefix": 2, "audio": 10},
        "peak": 15,
        "evicted": 0,
        "unit_ms": 12.0,
        "missed": False,
        "forwards": 2,
        "positions": 13,
        "kv_bytes": 1000,
        "encoder_bytes": 500,
        "input_tokens": 10,
        "output_tokens": 1,
    }
    return UnitReport(**{**values, **changes})
