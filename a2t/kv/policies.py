"""Which residents leave after a unit. One signature for all policies; they read the ledger and change nothing.

To add one, write a frozen dataclass with `name` and `plan_eviction`, and list it in POLICIES. A window that re-rotates
what stays says so in `Eviction.rotation`; MiniCPM-o's own two are in windows.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from heapq import merge
from itertools import groupby
from typing import Any, ClassVar, Literal, Protocol

from a2t.kv.eviction import NOTHING, Eviction
from a2t.kv.ledger import PREFIX_UNIT, Ledger, Tier
from a2t.kv.windows import BasicWindow, ContextWindow


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def plan_eviction(self, ledger: Ledger, budget: int | None) -> Eviction:
        """What must leave so that at most `budget` positions stay resident; None: no limit. Called after each unit."""
        ...


@dataclass(frozen=True)
class A2T:
    """The paper's rule: while residents > budget, all evictable positions of the oldest unit that still has any leave,
    never those of the `retention_units` most recent units; text and prefix stay. Budget 0: everything eligible goes.

    `text_tier`: when that is not enough, `grow` lets the cache exceed the budget (the paper); `fold` lets the oldest
    text leave, heard and said, whole units, outside the retention window. The journal keeps it. The prefix stays.
    """

    name: ClassVar[str] = "a2t"
    retention_units: int = 5
    text_tier: Literal["grow", "fold"] = "grow"

    def __post_init__(self) -> None:
        if self.retention_units < 0:
            raise ValueError(f"retention_units is {self.retention_units}; it must be 0 or more")
        if self.text_tier not in ("grow", "fold"):
            raise ValueError(f"text_tier is {self.text_tier!r}; choose 'grow' or 'fold'")

    def plan_eviction(self, ledger: Ledger, budget: int | None) -> Eviction:
        if budget is None or ledger.residents <= budget:
            return NOTHING
        drop, units = _oldest_units(ledger, (Tier.EVICTABLE,), ledger.residents - budget, self.retention_units)
        folded: list[int] = []
        excess = ledger.residents - len(drop) - budget
        if excess > 0 and self.text_tier == "fold":
            text, folded = _oldest_units(ledger, (Tier.TRANSCRIPT, Tier.RESPONSE), excess, self.retention_units)
            drop += text
        return Eviction(drop=tuple(sorted(drop)), units=tuple(units), folded_units=tuple(folded))


@dataclass(frozen=True)
class Unbounded:
    """Nothing ever leaves."""

    name: ClassVar[str] = "unbounded"

    def plan_eviction(self, ledger: Ledger, budget: int | None) -> Eviction:
        return NOTHING


@dataclass(frozen=True)
class StreamingLLM:
    """Keeps the first `sink` positions ever fed and the `recent` latest, of whatever kind (Xiao et al., 2023, without
    re-rotation: keys keep the phase they were written with, as in the other policies here). The budget plays no part:
    `sink` + `recent` is the limit. `Eviction.units` names the units that lost positions."""

    name: ClassVar[str] = "streaming_llm"
    sink: int = 4
    recent: int = 2000

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 0:
            raise ValueError(f"sink is {self.sink} and recent {self.recent}; both must be 0 or more")

    def plan_eviction(self, ledger: Ledger, budget: int | None) -> Eviction:
        held_sink = sum(ledger.slot_at(position) is not None for position in range(self.sink))
        excess = ledger.residents - held_sink - self.recent
        if excess <= 0:
            return NOTHING
        oldest = ledger.by_age(skip=held_sink)
        drop = [next(oldest) for _ in range(excess)]
        units = sorted({ledger.units[slot] for slot in drop} - {PREFIX_UNIT})
        return Eviction(drop=tuple(sorted(drop)), units=tuple(units))


def _oldest_units(
    ledger: Ledger, tiers: tuple[Tier, ...], excess: int, retention_units: int
) -> tuple[list[int], list[int]]:
    """Slots of `tiers` of the oldest units, whole units, until `excess` slots are found or no unit is eligible."""
    drop: list[int] = []
    units: list[int] = []
    retained_from = ledger.last_unit - retention_units + 1
    for unit, _ in groupby(merge(*(ledger.resident_units(tier) for tier in tiers))):
        if len(drop) >= excess or unit >= retained_from:
            break
        for tier in tiers:
            drop += ledger.unit_slots(unit, tier)
        units.append(unit)
    return drop, units


POLICIES: dict[str, type[A2T | Unbounded | StreamingLLM | BasicWindow | ContextWindow]] = {
    A2T.name: A2T,
    Unbounded.name: Unbounded,
    StreamingLLM.name: StreamingLLM,
    BasicWindow.name: BasicWindow,
    ContextWindow.name: ContextWindow,
}


def a2t(retention_units: int = 5, text_tier: Literal["grow", "fold"] = "grow") -> A2T:
    return A2T(retention_units, text_tier)


def unbounded() -> Unbounded:
    return Unbounded()


def streaming_llm(sink: int = 4, recent: int = 2000) -> StreamingLLM:
    return StreamingLLM(sink, recent)


def make_policy(name: str, **options: Any) -> Policy:
    """The policy called `name`. ValueError naming the choices if there is none, or its options if one does not fit."""
    if name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}; choose one of {_listed(POLICIES)}")
    known = [field.name for field in fields(POLICIES[name])]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"policy {name!r} has no option {_listed(unknown)}; it takes {_listed(known) or 'none'}")
    return POLICIES[name](**options)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
