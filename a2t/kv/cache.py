"""The KV arena: one row a conversation, a dense prefix, append at the tail, drop by moving the tail into the holes.

Knows slots, not kinds. Shape suffixes: R rows, H KV heads, C capacity, L resident positions, T packed new tokens,
D head dimension, N layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from a2t.kv.ledger import swap_moves
from a2t.kv.shape import LanguageShape


class ArenaFull(RuntimeError):
    """No row is free."""


class Leaving(NamedTuple):
    """Slots that leave a row in the middle of its feed: the first `after` new tokens see them, the others do not, and
    they are dropped when the batch is committed."""

    after: int
    slots: tuple[int, ...]


def rows_in(nbytes: int, shape: LanguageShape, capacity: int) -> int:
    """How many rows of `capacity` positions fit `nbytes` of memory. ValueError if none does."""
    row = capacity * shape.bytes_per_position
    if nbytes < row:
        raise ValueError(
            f"a row of {capacity} positions takes {row:,} bytes and {nbytes:,} are given; give more memory, or lower "
            "the capacity (and with it the budget)"
        )
    return nbytes // row


class KVArena:
    """Keys and values of `rows` conversations, each of at most `capacity` positions, in one tensor.

    Keys are stored after rotation. Memory is reserved, not touched: on CPU a page costs nothing before it is written.
    """

    def __init__(self, shape: LanguageShape, rows: int, capacity: int) -> None:
        if rows < 1 or capacity < 1:
            raise ValueError(f"an arena of {rows} rows and {capacity} positions holds nothing; give 1 or more of each")
        self.shape = shape
        self.rows = rows
        self.capacity = capacity
        self.kv_N2RHCD = torch.empty(
            (shape.layers, 2, rows, shape.kv_heads, capacity, shape.head_dim), dtype=shape.dtype, device=shape.device
        )
        self.lengths = [0] * rows
        self._free = list(range(rows - 1, -1, -1))
        self._in_use = [False] * rows
        # every layer's keys and values of one row, [2N, H, C, D]: index 2 * layer is keys, 2 * layer + 1 values
        self._row_views = [self.kv_N2RHCD[:, :, row].flatten(0, 1) for row in range(rows)]

    @property
    def bytes_per_position(self) -> int:
        return self.shape.bytes_per_position

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def nbytes_resident(self, row: int) -> int:
        """Bytes of the row's resident keys and values."""
        return self.lengths[row] * self.bytes_per_position

    def allocate(self) -> int:
        """An empty row. Raises ArenaFull when every row is in use."""
        if not self._free:
            raise ArenaFull(f"all {self.rows} rows are in use; close a conversation or make an arena with more rows")
        row = self._free.pop()
        self._in_use[row] = True
        self.lengths[row] = 0
        return row

    def release(self, row: int) -> None:
        """Give the row back; what it held is forgotten."""
        self._check(row)
        self._in_use[row] = False
        self.lengths[row] = 0
        self._free.append(row)

    def clear(self, row: int) -> None:
        """Forget what the row holds and keep the row."""
        self._check(row)
        self.lengths[row] = 0

    def pack(
        self, rows: Sequence[int], counts: Sequence[int], leaving: Sequence[Leaving | None] | None = None
    ) -> PackedBatch:
        """A step in which `rows[i]` feeds `counts[i]` new tokens, in packed order, and `leaving[i]` leaves it.

        ValueError if a row is named twice, feeds nothing, or would outgrow the capacity.
        """
        if not rows or len(rows) != len(counts) or len(set(rows)) != len(rows):
            raise ValueError(f"rows {list(rows)} with counts {list(counts)}: name each row once, with its count")
        for row, count in zip(rows, counts, strict=True):
            self._check(row)
            if count < 1:
                raise ValueError(f"row {row} feeds {count} tokens; leave it out of the batch instead")
            if self.lengths[row] + count > self.capacity:
                raise ValueError(
                    f"row {row} holds {self.lengths[row]} positions and {count} more do not fit the capacity of "
                    f"{self.capacity}; evict (lower the budget) or make the arena with a larger capacity"
                )
        return PackedBatch(self, rows, counts, leaving)

    def take_back(self, row: int, count: int) -> None:
        """Forget the `count` tokens at the row's tail."""
        self._check(row)
        assert 0 <= count <= self.lengths[row]
        self.lengths[row] -= count

    def drop(self, row: int, slots: Collection[int]) -> None:
        """Forget `slots` of the row; the tail moves into the holes (a2t.kv.ledger.swap_moves)."""
        self._check(row)
        self._leave(row, slots, self.lengths[row])

    def _leave(self, row: int, slots: Collection[int], before: int) -> None:
        """Drop `slots` among the first `before`, as `drop` would have done then; what came since moves up."""
        moves = swap_moves(before, slots)
        moves += [(slot, slot - len(slots)) for slot in range(before, self.lengths[row]) if slots]
        if moves:
            kv = self._row_views[row]
            source, target = torch.tensor(moves, device=kv.device).unbind(1)
            kv.index_copy_(2, target, kv.index_select(2, source))
        self.lengths[row] -= len(slots)

    def rotate(self, row: int, slots: Sequence[int], delta: int, inv_freq: Tensor) -> None:
        """Turn the stored keys in `slots` by `delta` positions, as if they had been fed that much later.

        `inv_freq` [D/2]: the model's rotary frequencies (halves layout, as in transformers' `rotate_half`). Computed in
        float32 at least, like the model's own rotation.
        """
        self._check(row)
        if not slots or delta == 0:
            return
        keys = self._row_views[row][0::2]
        index = torch.tensor(list(slots), device=keys.device)
        k_NHSD = keys.index_select(2, index)
        exact = torch.promote_types(k_NHSD.dtype, torch.float32)
        angle = torch.cat((inv_freq, inv_freq)).to(device=keys.device, dtype=exact) * delta
        k_NHSD = k_NHSD.to(exact)
        first, second = k_NHSD.chunk(2, dim=-1)
        turned = k_NHSD * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()
        keys.index_copy_(2, index, turned.to(keys.dtype))

    def gather(self, row: int, slots: Sequence[int]) -> dict[str, Tensor]:
        """Keys and values of some residents, in the order given, as `export` gives them all."""
        self._check(row)
        kv_N2HLD = self.kv_N2RHCD[:, :, row].index_select(3, torch.tensor(list(slots), device=self.kv_N2RHCD.device))
        return {"keys": kv_N2HLD[:, 0], "values": kv_N2HLD[:, 1]}

    def extend(self, row: int, tensors: dict[str, Tensor]) -> None:
        """Append positions computed elsewhere, in the form of `gather`, at the row's tail. ValueError if they do not
        fit its capacity."""
        self._check(row)
        start, count = self.lengths[row], tensors["keys"].shape[2]
        if start + count > self.capacity:
            raise ValueError(f"{start} positions and {count} more do not fit the capacity of {self.capacity}")
        self.kv_N2RHCD[:, 0, row, :, start : start + count] = tensors["keys"]
        self.kv_N2RHCD[:, 1, row, :, start : start + count] = tensors["values"]
        self.lengths[row] = start + count

    def export(self, row: int) -> dict[str, Tensor]:
        """The row's residents, in slot order: {"keys", "values"}, each [layers, kv_heads, length, head_dim], copies."""
        self._check(row)
        kv_N2HLD = self.kv_N2RHCD[:, :, row, :, : self.lengths[row]]
        return {"keys": kv_N2HLD[:, 0].contiguous().clone(), "values": kv_N2HLD[:, 1].contiguous().clone()}

    def load(self, row: int, tensors: dict[str, Tensor]) -> None:
        """Put an exported row back, bit for bit. ValueError if another model wrote it or it is too long."""
        self._check(row)
        keys, values = tensors["keys"], tensors["values"]
        shape = self.shape
        length = keys.shape[2] if keys.dim() == 4 else -1
        expected = (shape.layers, shape.kv_heads, length, shape.head_dim)
        if keys.shape != expected or values.shape != expected or not keys.dtype == values.dtype == shape.dtype:
            raise ValueError(
                f"keys {tuple(keys.shape)} {keys.dtype} and values {tuple(values.shape)} {values.dtype} do not fit a "
                f"model with {shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_dim}, {shape.dtype}; "
                "restore with the model that wrote them"
            )
        if length > self.capacity:
            raise ValueError(f"{length} saved positions do not fit the capacity of {self.capacity}; use a larger arena")
        self.kv_N2RHCD[:, 0, row, :, :length].copy_(keys)
        self.kv_N2RHCD[:, 1, row, :, :length].copy_(values)
        self.lengths[row] = length

    def _check(self, row: int) -> None:
        if not (0 <= row < self.rows and self._in_use[row]):
            used = [r for r in range(self.rows) if self._in_use[r]]
            raise ValueError(f"row {row} is not allocated (rows in use: {used})")


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
        self.masks: dict[tuple[int, int], Tensor] = {}  # of attention, by row and first query: the same in every layer
        # views into the arena, made once a step: [H, count, D] to write, [H, end, D] to read; 2 * layer (+ 1) as above
        self._tails = [
            arena._row_views[row].narrow(2, start, count).unbind(0)
            for row, start, count in zip(self.rows, self.starts, self.counts, strict=True)
        ]
        self._dense = [
            arena._row_views[row].narrow(2, 0, end).unbind(0) for row, end in zip(self.rows, self.ends, strict=True)
        ]

    def at(self, layer: int) -> tuple[PackedBatch, int]:
        """The batch that holds a layer's keys and values, and the layer's number in it: itself, on one device."""
        return self, layer

    def update(self, layer: int, k_1HTD: Tensor, v_1HTD: Tensor) -> None:
        """Write one layer's new keys (after rotation) and values at the tails of the rows, in place."""
        assert not self.committed, "a batch is good for one forward"
        k_HTD, v_HTD = k_1HTD[0], v_1HTD[0]
        if k_HTD.is_cuda:
            self._scatter(layer, k_HTD, v_HTD)
            return
        if len(self.rows) == 1:
            tails = self._tails[0]
            tails[2 * layer].copy_(k_HTD)
            tails[2 * layer + 1].copy_(v_HTD)
            return
        for tails, k_HtD, v_HtD in zip(
            self._tails, k_HTD.split(self.counts, 1), v_HTD.split(self.counts, 1), strict=True
        ):
            tails[2 * layer].copy_(k_HtD)
            tails[2 * layer + 1].copy_(v_HtD)

    def _scatter(self, layer: int, k_HTD: Tensor, v_HTD: Tensor) -> None:
        """The same in two kernel launches, however many rows."""
        where, kv_2RHCD = self.paged, self.arena.kv_N2RHCD[layer]
        kv_2RHCD[0].transpose(1, 2)[where.rows_T, where.slots_T] = k_HTD.transpose(0, 1)
        kv_2RHCD[1].transpose(1, 2)[where.rows_T, where.slots_T] = v_HTD.transpose(0, 1)

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
        views = self._dense[i]
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
