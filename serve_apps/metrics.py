"""Gauges on Ray's metrics port (Prometheus sees them as `ray_a2t_...`): a conversation's, set by its session actor, and
an engine's.

Ray's own metrics add up the actors of a class, so what one conversation takes is told here.  A gauge that is not set
again for half a minute vanishes from Ray's port: it is set every few seconds, and gone soon after its process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from serve_apps.messages import View

STATES = ("live", "paused", "moving", "restoring", "closed")
UNIT_MS = [20, 50, 100, 150, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1500, 2000, 5000]

SESSION = {
    "kv_bytes": "bytes of the language model's cache by kind of position",
    "residents": "resident positions by kind",
    "budget": "most resident positions after each unit; absent where there is no limit",
    "encoder_bytes": "bytes of the audio encoder's cache",
    "host_uss_bytes": "memory of this session's actor that is its own",
    "evicted": "positions evicted so far",
    "units": "units finished so far",
    "unit_ms": "processing time of the last unit",
    "deadline_misses": "units so far that took longer than their second",
    "backlog_s": "seconds heard and not processed yet",
    "state": "1 for the state it is in",
}
ENGINE = {
    "rows": "conversations that it can hold",
    "rows_used": "rows held or promised",
    "rows_free": "rows that it would give away now",
    "batch_size": "conversations in a step, mean since the last report",
    "step_ms": "time of a step, mean since the last report",
    "forwards_per_unit": "forwards that a unit took, mean since the last report",
    "unit_ms": "its busy time for one unit of one conversation",
    "busy_share": "share of the time since the last report in which it worked",
    "restores": "conversations rebuilt here after the loss of another engine",
    "failed_restores": "conversations that could not be rebuilt here",
    "host_uss_bytes": "memory of this engine's process that is its own",
}
BY = {"kv_bytes": "kind", "residents": "kind", "state": "state"}


class SessionGauges:
    def __init__(self, session: str):
        self._gauges = _gauges("session", SESSION, session)

    def __call__(self, view: View) -> None:
        memory, gauges = view["memory"], self._gauges
        total = max(1, memory["total"])
        for kind, count in memory["residents"].items():
            gauges["residents"].set(count, {"kind": kind})
            gauges["kv_bytes"].set(memory["kv_bytes"] * count / total, {"kind": kind})
        for state in STATES:
            gauges["state"].set(float(view["state"] == state), {"state": state})
        if (budget := view["config"].get("max_kv_tokens")) is not None:
            gauges["budget"].set(budget)
        gauges["encoder_bytes"].set(memory["encoder_bytes"])
        gauges["host_uss_bytes"].set(memory["host_uss_bytes"])
        gauges["evicted"].set(memory["evicted"])
        gauges["units"].set(view["units"])
        gauges["unit_ms"].set(view["timing"]["unit_ms_last"])
        gauges["deadline_misses"].set(view["timing"]["deadline_misses"])
        gauges["backlog_s"].set(max(0.0, view["input"]["seconds"] - view["units"]))


class EngineGauges:
    """`unit(ms, missed)` after each unit; called with a Tally's gauges now and then."""

    def __init__(self, engine: str):
        self._gauges = _gauges("engine", ENGINE, engine)
        tags = {"tag_keys": ("engine",)}
        self._units = Histogram("a2t_engine_unit_time_ms", "processing time of units", UNIT_MS, **tags)
        self._missed = Counter("a2t_engine_missed_units", "units that took longer than their second", **tags)
        for metric in (self._units, self._missed):
            metric.set_default_tags({"engine": engine})

    def unit(self, unit_ms: float, missed: bool) -> None:
        self._units.observe(unit_ms)
        if missed:
            self._missed.inc()

    def __call__(self, values: dict[str, float]) -> None:
        self._gauges["host_uss_bytes"].set(own_memory())
        for name, value in values.items():
            self._gauges[name].set(value)


def own_memory() -> int:
    """Bytes of this process that no other shares (USS): what ending it would give back."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def _gauges(of: str, descriptions: dict[str, str], name: str) -> dict[str, Any]:
    gauges = {}
    for metric, description in descriptions.items():
        keys: Sequence[str] = (of, BY[metric]) if metric in BY else (of,)
        gauges[metric] = Gauge(f"a2t_{of}_{metric}", description, tuple(keys))
        gauges[metric].set_default_tags({of: name})
    return gauges
