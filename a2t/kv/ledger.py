"""Which positions of a conversation are resident: (position, kind, unit) a slot. No tensors, no token text.

Slot order mirrors the conversation's row of the KV arena: append at the tail, drop by moving tail slots into the holes.
Every operation costs what it touches (a unit, or what it evicts), never the number of residents: slots are indexed by
position, and by unit within each tier of kinds that leave or stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any

from a2t.kv.kinds import Kind

PREFIX_UNIT = -1
"""The unit number of positions that belong to no unit (the system prompt)."""


class Tier(IntEnum):
    """Kinds that leave together. EVICTABLE goes first; TRANSCRIPT and RESPONSE only in the text tier `fold`."""

    EVICTABLE = 0
    TRANSCRIPT = 1
    RESPONSE = 2
    PREFIX = 3


_KINDS = tuple(Kind)
_STAYS = {Kind.PREFIX: Tier.PREFIX, Kind.TRANSCRIPT: Tier.TRANSCRIPT, Kind.RESPONSE: Tier.RESPONSE}
_TIER_OF = tuple(Tier.EVICTABLE if kind.evictable else _STAYS[kind] for kind in _KINDS)


@dataclass(frozen=True, slots=True)
class Resident:
    """One resident position, as predicates see it."""

    slot: int
    position: int
    kind: Kind
    unit: int


def swap_moves(length: int, drop: Collection[int]) -> list[tuple[int, int]]:
    """Moves (source, destination) that keep the slots 0..length-1 dense when `drop` leaves.

    The holes below the new length are filled, in ascending order, from the surviving tail slots, in ascending order; no
    source is also a destination, so the moves may be done in any order or at once. Ledger and arena both follow this
    list, which is what keeps them mirrored. Costs O(len(drop)).
    """
    gone = drop if isinstance(drop, (set, frozenset)) else set(drop)
    if len(gone) != len(drop):
        raise ValueError(f"slots to drop are named twice: {sorted(drop)}; name each once")
    kept = length - len(gone)
    holes = sorted(slot for slot in gone if slot < kept)
    if gone and not (min(gone) >= 0 and max(gone) < length):
        raise ValueError(f"cannot drop slots {min(gone)}..{max(gone)} of a row that holds {length}")
    sources = [slot for slot in range(kept, length) if slot not in gone]
    assert len(sources) == len(holes)
    return list(zip(sources, holes, strict=True))


class Ledger:
    """The books of one conversation's row.

    `positions`, `kinds` and `units` are read by slot; change them only through the methods.
    """

    def __init__(self) -> None:
        self.next_position = 0
        self.last_unit = PREFIX_UNIT  # the highest unit number fed
        self.peak = 0  # most residents ever
        self.positions: list[int] = []
        self.kinds: list[Kind] = []
        self.units: list[int] = []
        self._count = [0] * len(_KINDS)
        self._slot_at: dict[int, int] = {}  # position -> slot, ascending in position (dicts keep insertion order)
        self._tiers: tuple[dict[int, set[int]], ...] = tuple({} for _ in Tier)  # unit -> its slots, oldest unit first

    @property
    def residents(self) -> int:
        return len(self.positions)

    def __len__(self) -> int:
        return len(self.positions)

    def append(self, kinds: Sequence[Kind], unit: int) -> range:
        """Book newly fed tokens at the tail; returns their positions.

        `unit`: number of the unit they belong to, PREFIX_UNIT (-1) for none. Units are fed in order: ValueError if
        `unit` is older than the newest one.
        """
        if unit < self.last_unit and unit != PREFIX_UNIT:
            raise ValueError(f"unit {unit} was fed after unit {self.last_unit}; feed units in order")
        first = self.next_position
        fed = range(first, first + len(kinds))
        slot = len(self.positions)
        self.positions.extend(fed)
        self.kinds.extend(kinds)
        self.units.extend([unit] * len(kinds))
        for position, kind in zip(fed, kinds, strict=True):
            self._count[kind] += 1
            self._slot_at[position] = slot
            self._tiers[_TIER_OF[kind]].setdefault(unit, set()).add(slot)
            slot += 1
        self.next_position = fed.stop
        self.last_unit = max(self.last_unit, unit)
        self.peak = max(self.peak, slot)
        return fed

    def drop(self, slots: Collection[int]) -> list[tuple[int, int]]:
        """Forget `slots`; returns the moves (source slot, destination slot) that the arena must make too."""
        moves = swap_moves(len(self.positions), slots)
        for slot in slots:
            kind, unit = self.kinds[slot], self.units[slot]
            self._count[kind] -= 1
            del self._slot_at[self.positions[slot]]
            tier = self._tiers[_TIER_OF[kind]]
            tier[unit].remove(slot)
            if not tier[unit]:
                del tier[unit]
        for source, target in moves:
            position, kind, unit = self.positions[source], self.kinds[source], self.units[source]
            self.positions[target], self.kinds[target], self.units[target] = position, kind, unit
            self._slot_at[position] = target
            of_unit = self._tiers[_TIER_OF[kind]][unit]
            of_unit.remove(source)
            of_unit.add(target)
        kept = len(self.positions) - len(slots)
        del self.positions[kept:], self.kinds[kept:], self.units[kept:]
        return moves

    def take_back(self, count: int) -> None:
        """Unbook the `count` tokens fed last, as if they had never been: their positions are given again. They must be
        at the tail still (nothing dropped since)."""
        for _ in range(count):
            slot = len(self.positions) - 1
            assert self.positions[slot] == self.next_position - 1, "what is taken back was fed last"
            self.drop([slot])
            self.next_position -= 1

    def shift(self, slots: Collection[int], delta: int) -> None:
        """Renumber: the positions in `slots` and the next position move by `delta` (negative closes a gap).

        For windows that re-rotate what they keep; the arena's `rotate` does the same to the keys. Costs O(residents).
        ValueError if two residents would share a position or one would pass the next.
        """
        moved = {slot: self.positions[slot] + delta for slot in slots}
        positions = [moved.get(slot, position) for slot, position in enumerate(self.positions)]
        order = sorted(range(len(positions)), key=positions.__getitem__)
        slot_at = {positions[slot]: slot for slot in order}
        next_position = self.next_position + delta
        collide = len(slot_at) != len(positions)
        if collide or (order and not 0 <= positions[order[0]] <= positions[order[-1]] < next_position):
            raise ValueError(f"shifting {len(moved)} positions by {delta} makes them collide; shift whole tails only")
        self.positions, self._slot_at, self.next_position = positions, slot_at, next_position

    def insert(self, kinds: Sequence[Kind], first: int) -> range:
        """Book tokens of the prefix at positions `first`.., which nothing may occupy: a prefix is fed anew before units
        that stay. Their slots are at the tail like any other's. Costs O(residents). ValueError if they collide."""
        after = self.next_position
        taken = [p for p in range(first, first + len(kinds)) if p in self._slot_at]
        if taken or first + len(kinds) > after:
            raise ValueError(f"{len(kinds)} positions do not fit in at {first}: {taken[:1] or after} is in the way")
        self.next_position = first
        fed = self.append(kinds, PREFIX_UNIT)
        self.next_position = after
        self._slot_at = dict(sorted(self._slot_at.items()))
        return fed

    # reading

    def counts(self) -> dict[Kind, int]:
        """Residents by kind, every kind named."""
        return {kind: self._count[kind] for kind in _KINDS}

    def slots(self, predicate: Callable[[Resident], bool] | None = None) -> list[int]:
        """Slots that satisfy `predicate` (all without one), ascending. Costs O(residents): for tests and tools."""
        if predicate is None:
            return list(range(len(self.positions)))
        rows = zip(self.positions, self.kinds, self.units, strict=True)
        return [slot for slot, (p, k, u) in enumerate(rows) if predicate(Resident(slot, p, k, u))]

    def by_age(self, skip: int = 0) -> Iterator[int]:
        """Slots from the oldest resident position to the newest, the `skip` oldest left out."""
        return islice(self._slot_at.values(), skip, None)

    def slot_at(self, position: int) -> int | None:
        """The slot of a position, None if it is not resident."""
        return self._slot_at.get(position)

    def resident_units(self, tier: Tier) -> Iterator[int]:
        """Units with residents of `tier`, in the order they were fed. Do not drop while iterating."""
        return iter(self._tiers[tier])

    def unit_slots(self, unit: int, tier: Tier) -> frozenset[int]:
        """The slots of one unit's residents of `tier`."""
        return frozenset(self._tiers[tier].get(unit, ()))

    def check(self) -> None:
        """Assert every invariant from scratch. O(residents): for tests and after a restore."""
        length = len(self.positions)
        assert len(self.kinds) == len(self.units) == length <= self.peak
        assert sum(self._count) == length
        assert all(self._count[kind] == self.kinds.count(kind) for kind in _KINDS)
        assert len(self._slot_at) == length
        assert {p: s for s, p in enumerate(self.positions)} == self._slot_at
        assert list(self._slot_at) == sorted(self._slot_at)
        assert all(0 <= p < self.next_position for p in self.positions)
        assert all(unit <= self.last_unit for unit in self.units)
        expected: list[dict[int, set[int]]] = [{} for _ in Tier]
        for slot, (kind, unit) in enumerate(zip(self.kinds, self.units, strict=True)):
            expected[_TIER_OF[kind]].setdefault(unit, set()).add(slot)
        assert tuple(expected) == self._tiers
        for tier in self._tiers:
            fed = [unit for unit in tier if unit != PREFIX_UNIT]
            assert fed == sorted(fed)

    # saving

    def to_json(self) -> dict[str, Any]:
        """JSON values that `from_json` restores exactly, slot order included."""
        return {
            "next_position": self.next_position,
            "last_unit": self.last_unit,
            "peak": self.peak,
            "positions": list(self.positions),
            "kinds": [int(kind) for kind in self.kinds],
            "units": list(self.units),
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Ledger:
        """Raises ValueError if `saved` contradicts itself (edited or cut off)."""
        ledger = cls()
        positions, kinds, units = saved["positions"], [Kind(kind) for kind in saved["kinds"]], saved["units"]
        if not len(positions) == len(kinds) == len(units):
            raise ValueError(
                f"a saved ledger has {len(positions)} positions, {len(kinds)} kinds, {len(units)} units; it is damaged"
            )
        ledger.next_position, ledger.last_unit, ledger.peak = saved["next_position"], saved["last_unit"], saved["peak"]
        ledger.positions, ledger.kinds, ledger.units = list(positions), kinds, list(units)
        for slot in sorted(range(len(positions)), key=positions.__getitem__):  # oldest first, as they were fed
            ledger._slot_at[positions[slot]] = slot
            ledger._count[kinds[slot]] += 1
            ledger._tiers[_TIER_OF[kinds[slot]]].setdefault(units[slot], set()).add(slot)
        try:
            ledger.check()
        except AssertionError as broken:
            raise ValueError("a saved ledger contradicts itself; it is damaged, restore from the journal") from broken
        return ledger
