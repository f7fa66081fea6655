"""What an engine did since its gauges were last set. No Ray."""

from __future__ import annotations

import time
from collections.abc import Callable

from serve_apps.messages import EngineLoad, Failure, UnitReport


class Tally:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._units = self._forwards = 0
        self._restores = self._failed_restores = 0  # in all
        self._steps, self._busy_s, self._at = 0, 0.0, clock()

    def restored(self, failure: Failure | None) -> None:
        if failure is None:
            self._restores += 1
        else:
            self._failed_restores += 1

    def unit(self, report: UnitReport) -> None:
        self._units += 1
        self._forwards += report.forwards

    def gauges(self, load: EngineLoad, steps: int, busy_s: float) -> dict[str, float]:
        """`steps`, `busy_s`: of the step loop since it began. A forward of a unit is one row of one step. Where nothing
        happened there is no mean of it."""
        now = self._clock()
        stepped, worked, passed = steps - self._steps, busy_s - self._busy_s, now - self._at
        units, forwards = self._units, self._forwards
        self._units = self._forwards = 0
        self._steps, self._busy_s, self._at = steps, busy_s, now
        values = {
            "rows": float(load.rows),
            "rows_used": float(len(load.sessions)),
            "rows_free": 0.0 if load.draining else float(load.rows_free),
            "unit_ms": load.unit_ms,
            "busy_share": worked / passed if passed > 0 else 0.0,
            "restores": float(self._restores),
            "failed_restores": float(self._failed_restores),
        }
        if stepped:
            values["step_ms"] = 1000.0 * worked / stepped
        if stepped and units:
            values["batch_size"] = forwards / stepped
        if units:
            values["forwards_per_unit"] = forwards / units
        return values
