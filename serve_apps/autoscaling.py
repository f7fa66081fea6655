"""How many engines a fleet of conversations needs. Serve asks; the engines' own figures answer. No Ray."""

from __future__ import annotations

import math
from typing import Any


class RowsAndHeadroom:
    """Engines for the conversations that are held and those that wait, by KV rows and by unit time.

    An engine holds as many as it has rows, and no more than fit with their measured unit times into `max_load` of
    each second. `spare` rows are kept free beside those in use, so that a caller rarely waits for an engine to start;
    with no conversation at all there is nothing to keep free, and the fleet shrinks to its minimum, which may be 0. An
    engine is given up only when the others have room for everybody: a replica that goes hands its conversations over.

    Serve applies its minimum, maximum and delays to the answer, and starts the first engine from none by itself when a
    request waits for it (placement sends one).
    """

    def __init__(self, max_load: float = 0.85, spare: int = 1):
        self.max_load, self.spare = max_load, spare

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        metrics = ctx.aggregated_metrics or {}
        rows = list(metrics.get("rows", {}).values())
        if not rows:  # none has said anything yet
            return ctx.target_num_replicas, {}
        held = sum(metrics.get("held", {}).values())
        waiting = max(metrics.get("waiting", {}).values(), default=0.0)
        unit_ms = max(metrics.get("unit_ms", {}).values(), default=0.0)
        each = self.conversations(sum(rows) / len(rows), unit_ms)
        callers = math.ceil(round(held + waiting, 3))  # averages over time: who moves from one to the other counts once
        if not callers:
            return 0, {}
        return math.ceil((callers + self.spare) / each), {}

    def conversations(self, rows: float, unit_ms: float) -> int:
        """How many one engine holds."""
        by_time = 1000.0 * self.max_load / unit_ms if unit_ms else math.inf
        return max(1, math.floor(min(rows, by_time)))
