"""The KV arena of a model whose layers lie on several devices: one arena a device, kept in step.

Rows, lengths and slots are the same in all of them, so ledger, policies and engine see one arena.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from a2t.kv.batch import Leaving, PackedBatch
from a2t.kv.cache import KVArena
from a2t.kv.shape import LanguageShape


def make_arena(shape: LanguageShape, rows: int, capacity: int) -> KVArena:
    """The arena that a model of `shape` needs."""
    return KVArena(shape, rows, capacity) if shape.layer_devices is None else SplitArena(shape, rows, capacity)


class SplitArena(KVArena):
    """`parts`: one KVArena for each run of layers on one device."""

    def __init__(self, shape: LanguageShape, rows: int, capacity: int) -> None:
        assert shape.layer_devices is not None and len(shape.layer_devices) == shape.layers
        self.shape, self.rows, self.capacity = shape, rows, capacity
        runs = [(device, len(list(run))) for device, run in groupby(shape.layer_devices)]
        self.parts = [
            KVArena(replace(shape, layers=count, device=device, layer_devices=None), rows, capacity)
            for device, count in runs
        ]
        self.counts = [count for _, count in runs]
        self.owner = [(part, layer) for part, count in enumerate(self.counts) for layer in range(count)]

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self.parts[0].lengths

    @property
    def free_rows(self) -> int:
        return self.parts[0].free_rows

    def allocate(self) -> int:
        (row,) = {part.allocate() for part in self.parts}
        return row

    def release(self, row: int) -> None:
        self._all(lambda part: part.release(row))

    def clear(self, row: int) -> None:
        self._all(lambda part: part.clear(row))

    def pack(
        self, rows: Sequence[int], counts: Sequence[int], leaving: Sequence[Leaving | None] | None = None
    ) -> PackedBatch:
        return SplitBatch(self, [part.pack(rows, counts, leaving) for part in self.parts])

    def take_back(self, row: int, count: int) -> None:
        self._all(lambda part: part.take_back(row, count))

    def drop(self, row: int, slots: Collection[int]) -> None:
        self._all(lambda part: part.drop(row, slots))

    def rotate(self, row: int, slots: Sequence[int], delta: int, inv_freq: Tensor) -> None:
        self._all(lambda part: part.rotate(row, slots, delta, inv_freq))

    def gather(self, row: int, slots: Sequence[int]) -> dict[str, Tensor]:
        return self._joined([part.gather(row, slots) for part in self.parts])

    def export(self, row: int) -> dict[str, Tensor]:
        return self._joined([part.export(row) for part in self.parts])

    def extend(self, row: int, tensors: dict[str, Tensor]) -> None:
        for part, own in zip(self.parts, self._divided(tensors), strict=True):
            part.extend(row, own)

    def load(self, row: int, tensors: dict[str, Tensor]) -> None:
        if tensors["keys"].shape[:1] != (self.shape.layers,):
            raise ValueError(f"{tensors['keys'].shape[0]} saved layers do not fit a model with {self.shape.layers}")
        for part, own in zip(self.parts, self._divided(tensors), strict=True):
            part.load(row, own)

    def _all(self, act: Callable[[KVArena], Any]) -> None:
        for part in self.parts:
            act(part)

    def _joined(self, found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([f[name].to(self.shape.device) for f in found]) for name in ("keys", "values")}

    def _divided(self, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        parts = zip(*(tensors[name].split(self.counts) for name in ("keys", "values")), strict=True)
        return [
            {"keys": keys.to(part.shape.device), "values": values.to(part.shape.device)}
            for part, (keys, values) in zip(self.parts, parts, strict=True)
        ]


class SplitBatch(PackedBatch):
    """One step's batch: each device's own, and which of them a layer belongs to."""

    def __init__(self, arena: SplitArena, batches: list[PackedBatch]) -> None:
        self.arena, self.batches = arena, batches
        first = batches[0]
        self.rows, self.counts, self.starts, self.ends = first.rows, first.counts, first.starts, first.ends
        self.tokens, self.offsets = first.tokens, first.offsets

    def at(self, layer: int) -> tuple[PackedBatch, int]:
        arena = self.arena
        assert isinstance(arena, SplitArena)
        part, own = arena.owner[layer]
        return self.batches[part], own

    def update(self, layer: int, k_1HTD: Tensor, v_1HTD: Tensor) -> None:
        batch, own = self.at(layer)
        batch.update(own, k_1HTD, v_1HTD)

    def dense(self, layer: int, i: int) -> tuple[Tensor, Tensor]:
        batch, own = self.at(layer)
        return batch.dense(own, i)

    def commit(self) -> None:
        for batch in self.batches:
            batch.commit()
