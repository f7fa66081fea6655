"""The two windows that MiniCPM-o ships, as policies: baselines here.  Neither keeps what the user said.

Both drop whole units, text too, oldest first, and close the gap: what stays is renumbered and re-rotated.  The budget
plays no part; their own marks are the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from a2t.kv.eviction import NOTHING, Eviction, Refeed, Rotation
from a2t.kv.kinds import Kind
from a2t.kv.ledger import PREFIX_UNIT, Ledger


@runtime_checkable
class ReadsText(Protocol):
    """A policy that must know what the model said; the engine calls this in place of `plan_eviction`."""

    def plan_with_text(self, ledger: Ledger, spoken: Sequence[Sequence[int]]) -> Eviction:
        """`spoken`: of every unit that is not the newest, the ids of its response, by unit number."""
        ...


@dataclass(frozen=True)
class BasicWindow:
    """`basic`: over `high` residents, whole units leave, oldest first, until at most `low` are left."""

    name: ClassVar[str] = "basic"
    high: int = 8000
    low: int = 6000

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError(f"high is {self.high} and low {self.low}; give 0 < low <= high")

    def plan_eviction(self, ledger: Ledger, budget: int | None) -> Eviction:
        if ledger.residents <= self.high:
            return NOTHING
        left, drop, units = ledger.residents, list[int](), list[int]()
        for unit, slots in _units(ledger):
            if left <= self.low:
                break
            left -= len(slots)
            drop += slots
            units.append(unit)
        prefix = ledger.counts()[Kind.PREFIX]
        return Eviction(tuple(sorted(drop)), tuple(units), rotation=Rotation(prefix, -len(drop)))


@dataclass(frozen=True)
class ContextWindow:
    """`context`: at most `max_units` units; what the model said in those that left stays as prefix, the latest
    `previous_max_tokens` of it.

        [prompt] [suffix] [units..]   becomes, once there is such text,   [prompt] [marker text..] [suffix] [units..]

    `suffix_ids`: the tail of the system prompt that comes after the kept text; `marker_ids`: "\\n\\nprevious: ";
    `special_ids`: tokens that are no text.  MiniCPMO.context_window makes these options from the tokenizer.
    """

    name: ClassVar[str] = "context"
    suffix_ids: Sequence[int] = ()
    marker_ids: Sequence[int] = ()
    special_ids: Sequence[int] = ()
    max_units: int = 24
    previous_max_tokens: int = 500

    def __post_init__(self) -> None:
        if self.max_units < 1 or self.previous_max_tokens < 1:
            raise ValueError(
                f"max_units is {self.max_units} and previous_max_tokens {self.previous_max_tokens}; give 1 or more"
            )

    def plan_eviction(self, ledger: Ledger, budget: int | None) -> Eviction:
        raise ValueError("the context window keeps what the model said: it needs `plan_with_text`")

    def plan_with_text(self, ledger: Ledger, spoken: Sequence[Sequence[int]]) -> Eviction:
        blocks = list(_units(ledger))
        leaving = blocks[: max(0, len(blocks) - self.max_units)]
        if not leaving:
            return NOTHING
        drop = [slot for _, slots in leaving for slot in slots]
        units = tuple(unit for unit, _ in leaving)
        previous = self.previous(spoken, units[-1] + 1)
        if previous == self.previous(spoken, units[0]):
            rotation = Rotation(ledger.counts()[Kind.PREFIX], -len(drop))
            return Eviction(tuple(sorted(drop)), units, rotation=rotation)
        old_prefix = ledger.counts()[Kind.PREFIX]
        held = len(self.previous(spoken, units[0])) + len(self.suffix_ids)
        prompt = old_prefix - held
        stale = [slot for slot in ledger.by_age(skip=prompt) if ledger.kinds[slot] == Kind.PREFIX]
        assert len(stale) == held, "the prefix is the prompt, the kept text and the suffix"
        ids = (*previous, *self.suffix_ids)
        delta = len(ids) - held - len(drop)
        return Eviction(
            tuple(sorted(drop + stale)), units, rotation=Rotation(old_prefix, delta), refeed=Refeed(ids, prompt)
        )

    def previous(self, spoken: Sequence[Sequence[int]], units: int) -> tuple[int, ...]:
        """What is kept of the text of the first `units` units, marker first; nothing if they said nothing."""
        special = frozenset(self.special_ids)
        kept: list[int] = []
        for unit in reversed(range(units)):
            if len(kept) >= self.previous_max_tokens:
                break
            kept[:0] = [i for i in spoken[unit] if i not in special]
        return (*self.marker_ids, *kept[-self.previous_max_tokens :]) if kept else ()


def _units(ledger: Ledger) -> Sequence[tuple[int, list[int]]]:
    """(unit, its slots) of the resident units, oldest first."""
    found: dict[int, list[int]] = {}
    for slot in ledger.by_age():
        if ledger.units[slot] != PREFIX_UNIT:
            found.setdefault(ledger.units[slot], []).append(slot)
    return list(found.items())
