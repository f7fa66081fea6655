"""What a policy decides: which slots leave, and what happens to those that stay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rotation:
    """After the drop, every resident from position `first` on is renumbered by `delta`, as the next position is;
    its key is turned as if it had been fed there."""

    first: int
    delta: int


@dataclass(frozen=True)
class Refeed:
    """After drop and rotation, `ids` are fed as prefix at `first`.. ; they see the residents before `first` alone."""

    ids: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class Eviction:
    """What leaves. `drop`: slots, ascending; `units`: those that lost evictable positions, oldest first;
    `folded_units`: those whose text left the cache (it stays in the journal); `rotation`, `refeed`: as they say,
    in this order, after the drop."""

    drop: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    folded_units: tuple[int, ...] = ()
    rotation: Rotation | None = None
    refeed: Refeed | None = None

    def __bool__(self) -> bool:
        return bool(self.drop) or self.rotation is not None or self.refeed is not None


NOTHING = Eviction()
