"""The KV arena: one row a conversation, a dense prefix, append at the tail, drop by moving the tail into the holes.

Knows slots, not kinds; who feeds what in one forward is in batch.py. Shape suffixes: R rows, H KV heads, C capacity,
L resident positions, T packed new tokens, D head dimension, N layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from a2t.kv.batch import Leaving, PackedBatch
from a2t.kv.ledger import swap_moves
from a2t.kv.shape import LanguageShape

__all__ = ["ArenaFull", "KVArena", "Leaving", "PackedBatch", "rows_in"]


class ArenaFull(RuntimeError):
    """No row is free."""


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
        self.kv_N2RHCD = _zeros(
            (shape.layers, 2, rows, shape.kv_heads, capacity, shape.head_dim), shape.dtype, shape.device
        )
        self.lengths = [0] * rows
        self._free = list(range(rows - 1, -1, -1))
        self._in_use = [False] * rows
        self._labels: list[list[int]] | None = None
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
        self.clear(row)
        return row

    def labelled(self) -> list[list[int]]:
        """A number of the caller's for each slot of each row, which moves with it; append what is fed. For models that
        tell slots apart: from the first call on, all rows must have been empty then."""
        if self._labels is None:
            self._labels = [[] for _ in range(self.rows)]
        return self._labels

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
        if self._labels is not None:
            self._labels[row].clear()

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
        if self._labels is not None:
            del self._labels[row][self.lengths[row] :]

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
        if self._labels is not None:
            labels = self._labels[row]
            for slot, label in [(target, labels[source]) for source, target in moves]:
                labels[slot] = label
            del labels[self.lengths[row] :]

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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since what lies past a row's end is read under a mask and must be finite. On CPU they are pages that cost
    nothing before they are written, which torch.zeros would touch."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes, align = prod(shape) * dtype.itemsize, 64
    memory = torch.from_numpy(np.zeros(nbytes + align, np.uint8))
    start = -memory.data_ptr() % align
    return memory[start : start + nbytes].view(dtype).view(shape)
