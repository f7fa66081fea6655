"""One forward over rows of the arena: who feeds how much, where it goes, what attention reads. Suffixes: cache.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from a2t.kv.cache import KVArena


class Leaving(NamedTuple):
    """Slots that leave a row in the middle of its feed: the first `after` new tokens see them, the others do not, and
    they are dropped when the batch is committed."""

    after: int
    slots: tuple[int, ...]


MOSTLY = 0.75
"""Attention over several rows in one call must find at least this share of residents in what it reads."""


class Together(NamedTuple):
    """Rows of a batch whose attention is one call: K of them among R neighbouring rows of the arena."""

    members: frozenset[int]  # indices in the batch
    at_K: Tensor  # their packed tokens
    where_K: Tensor  # their places among the R rows
    kv_N2RHLD: Tensor  # views into the arena up to the longest row's end
    mask_R11L: Tensor | None  # hides what is past a shorter row's end


class Paged(NamedTuple):
    """A batch as variable-length kernels take it: every row of the arena is one page, of `capacity` positions."""

    rows_T: Tensor  # where each packed token goes: its row, and its slot there (int64)
    slots_T: Tensor
    query_ends: Tensor  # cumulative new tokens, [rows + 1], int32
    key_ends: Tensor  # cumulative residents, new ones included, likewise
    lengths: Tensor  # residents of each row, [rows], int32
    pages: Tensor  # the page of each row, [rows, 1], int32
    most_queries: int
    most_keys: int


class PackedBatch:
    """Who feeds how many new tokens in one step, and where their keys and values go.

    `rows[i]` feeds `counts[i]` tokens, packed from `offsets[i]`; it held `starts[i]` positions before and holds
    `ends[i]` after (less what is `leaving[i]`, once committed). Good for one forward: each layer calls `update`, the
    last step is `commit`.
    """

    def __init__(
        self,
        arena: KVArena,
        rows: Sequence[int],
        counts: Sequence[int],
        leaving: Sequence[Leaving | None] | None = None,
    ) -> None:
        self.arena = arena
        self.rows = tuple(rows)
        self.counts = tuple(counts)
        self.leaving = tuple(leaving) if leaving is not None else (None,) * len(self.rows)
        self.starts = tuple(arena.lengths[row] for row in rows)
        self.ends = tuple(start + count for start, count in zip(self.starts, counts, strict=True))
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + count)
        self.tokens = offsets.pop()
        self.offsets = tuple(offsets)
        self.committed = False
        # what each row is fed (a2t.duplex.feeds.Feed), for models that tell tokens apart
        self.feeds: Sequence[Any] = ()
        self.hides = False  # whether a model has put more into the masks than causality
        self.masks: dict[tuple[int, int], Tensor] = {}  # of attention, by row and first query: the same in every layer
        # views into the arena, made once a step: [H, count, D] to write, [H, end, D] to read; 2 * layer (+ 1) as above
        self._tail = arena._row_views[self.rows[0]].narrow(2, self.starts[0], self.counts[0]).unbind(0)
        self._dense: dict[int, tuple[Tensor, ...]] = {}

    def at(self, layer: int) -> tuple[PackedBatch, int]:
        """The batch that holds a layer's keys and values, and the layer's number in it: itself, on one device."""
        return self, layer

    def update(self, layer: int, k_1HTD: Tensor, v_1HTD: Tensor) -> None:
        """Write one layer's new keys (after rotation) and values at the tails of the rows, in place."""
        assert not self.committed, "a batch is good for one forward"
        k_HTD, v_HTD = k_1HTD[0], v_1HTD[0]
        if k_HTD.is_cuda or len(self.rows) > 1:
            self._scatter(layer, k_HTD, v_HTD)
            return
        self._tail[2 * layer].copy_(k_HTD)
        self._tail[2 * layer + 1].copy_(v_HTD)

    def _scatter(self, layer: int, k_HTD: Tensor, v_HTD: Tensor) -> None:
        """The same in two calls, however many rows."""
        where, kv_2RHCD = self.paged, self.arena.kv_N2RHCD[layer]
        kv_2RHCD[0].transpose(1, 2)[where.rows_T, where.slots_T] = k_HTD.transpose(0, 1)
        kv_2RHCD[1].transpose(1, 2)[where.rows_T, where.slots_T] = v_HTD.transpose(0, 1)

    @cached_property
    def together(self) -> Together | None:
        """The rows that feed one token each, where one call over the rows between the first and the last of them wastes
        little: they lie close, and none is much shorter than the longest."""
        ones = [i for i, count in enumerate(self.counts) if count == 1]
        if len(ones) < 2:
            return None
        rows, lengths = [self.rows[i] for i in ones], [self.ends[i] for i in ones]
        low, high, longest = min(rows), max(rows) + 1, max(lengths)
        if sum(lengths) < MOSTLY * (high - low) * longest:
            return None
        device, kv_N2RHCD = self.arena.kv_N2RHCD.device, self.arena.kv_N2RHCD
        at, where = torch.tensor([[self.offsets[i] for i in ones], [row - low for row in rows]], device=device)
        held_R = torch.full((high - low,), longest, device=device)
        held_R[where] = torch.tensor(lengths, device=device)
        mask_R11L = None
        if min(lengths) < longest:
            mask_RL = torch.zeros((high - low, longest), dtype=kv_N2RHCD.dtype, device=device)
            mask_RL.masked_fill_(torch.arange(longest, device=device) >= held_R[:, None], -torch.inf)
            mask_R11L = mask_RL[:, None, None]
        return Together(frozenset(ones), at, where, kv_N2RHCD[:, :, low:high, :, :longest], mask_R11L)

    @cached_property
    def paged(self) -> Paged:
        rows = [row for row, count in zip(self.rows, self.counts, strict=True) for _ in range(count)]
        slots = [slot for start, end in zip(self.starts, self.ends, strict=True) for slot in range(start, end)]
        query_ends, key_ends = [0, *accumulate(self.counts)], [0, *accumulate(self.ends)]
        packed = torch.tensor(
            [*rows, *slots, *query_ends, *key_ends, *self.ends, *self.rows], device=self.arena.kv_N2RHCD.device
        )  # one transfer for all of them
        T, R = self.tokens, len(self.rows)
        where, small = packed[: 2 * T].view(2, T), packed[2 * T :].int().split([R + 1, R + 1, R, R])
        return Paged(
            where[0], where[1], small[0], small[1], small[2], small[3].view(R, 1), max(self.counts), max(self.ends)
        )

    def dense(self, layer: int, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values that row `rows[i]` holds with its new tokens, views [kv_heads, ends[i], head_dim]."""
        views = self._dense.get(i)
        if views is None:
            views = self._dense[i] = self.arena._row_views[self.rows[i]].narrow(2, 0, self.ends[i]).unbind(0)
        return views[2 * layer], views[2 * layer + 1]

    def commit(self) -> None:
        """The new tokens are resident. Called once, after the last layer."""
        assert not self.committed, "a batch is committed once"
        for row, start, end in zip(self.rows, self.starts, self.ends, strict=True):
            assert self.arena.lengths[row] == start, "the row changed between pack and commit"
            self.arena.lengths[row] = end
        for row, start, leaving in zip(self.rows, self.starts, self.leaving, strict=True):
            if leaving is not None:
                self.arena._leave(row, leaving.slots, start + leaving.after)
        self.committed = True
