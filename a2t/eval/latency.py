"""Unit times against the deadline: the next second of audio arrives one second later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

DEADLINE_MS = 1000.0


@dataclass(frozen=True)
class Latency:
    """Processing times of `units` units in milliseconds; `misses` took longer than the deadline."""

    units: int
    mean: float
    p50: float
    p99: float
    max: float
    misses: int


def unit_latency(unit_ms: Iterable[float], deadline_ms: float = DEADLINE_MS) -> Latency:
    """`unit_ms`: audio in to result, side channel and eviction included. Percentiles interpolate linearly.

    Raises ValueError without any unit, or for a time that is no time.
    """
    times = np.fromiter(unit_ms, np.float64)
    if not times.size:
        raise ValueError("no unit was timed: stream at least one second of audio")
    if not np.isfinite(times).all() or (times < 0).any():
        raise ValueError(f"unit times must be finite and not negative, got {times[~(times >= 0)][:3].tolist()}")
    p50, p99 = np.percentile(times, [50, 99])
    return Latency(
        units=int(times.size),
        mean=float(times.mean()),
        p50=float(p50),
        p99=float(p99),
        max=float(times.max()),
        misses=int((times > deadline_ms).sum()),
    )
