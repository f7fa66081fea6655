"""How fast an engine is asked to be, and how fast it is: settings, measured times, admission. No tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    unit_seconds: float = 1.0
    """The time that a unit has, from the moment its audio is complete: one that takes longer counts as missed."""
    side_channel_budget_s: float | None = 0.8
    """How much of that the side channel may use; after it, and earlier where what must follow needs the time, it is
    told to hurry. None: never, so that what is decoded does not depend on the speed of the machine (evaluation)."""
    scratch_rows: int = 1
    """Rows of the arena kept free of conversations, for text questions."""
    step_tokens: int = 512
    """New tokens in one forward: long prompts come in pieces, and what is due later waits for the next."""
    admit_load: float | None = None
    """Conversations are admitted while their measured unit times fill no more than this share of a unit's second.
    None: while there are rows."""


class Overloaded(RuntimeError):
    """There are rows, and no time for another conversation."""


class Pace:
    """What units cost an engine. `unit_cost_s`: of its time, for one unit, averaged over the last thirty or so; 0 until
    one is finished."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.unit_cost_s = 0.0
        self._busy_s = 0.0  # since a unit was finished last

    def note(self, busy_s: float, units: int) -> None:
        """A step took so long and finished so many units."""
        self._busy_s += busy_s
        if units:
            weight = min(1.0, units / 30) if self.unit_cost_s else 1.0
            self.unit_cost_s += (self._busy_s / units - self.unit_cost_s) * weight
            self._busy_s = 0.0

    def load(self, conversations: int) -> float:
        """The share of each second that so many conversations take."""
        return conversations * self.unit_cost_s / self.config.unit_seconds

    def most(self) -> int | None:
        """How many conversations there is time for; None if that is not known or does not matter."""
        if self.config.admit_load is None or not self.unit_cost_s:
            return None
        return int(self.config.admit_load * self.config.unit_seconds / self.unit_cost_s)
