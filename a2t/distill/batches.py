"""Which sequences make an optimizer step, and what a forward over some of them needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from a2t.distill.config import DistillConfig
from a2t.distill.losses import Counts
from a2t.distill.packing import Packing, View
from a2t.distill.sequences import Pair, join_id
from a2t.duplex.protocol import AUDIO_ID, Layout
from a2t.models.scope import SIDE


@dataclass(frozen=True)
class Sequences:
    """Several layouts packed in one row; T positions, A audio embeddings."""

    ids_T: Tensor  # 0 where an audio embedding goes
    positions_T: Tensor
    audio_at_A: Tensor
    audio_AD: Tensor
    segment_T: Tensor  # whether a position is the side channel's
    packing: Packing
    starts: tuple[int, ...]  # of each sequence in the row

    @classmethod
    def of(
        cls, layouts: Sequence[Layout], audio: Sequence[Tensor], views: Sequence[View | None] | None = None
    ) -> Sequences:
        """`audio[i]` [units * audio_per_unit, D] of layout i; `views` as in `Packing.of`."""
        lengths = [len(x) for x in layouts]
        ids_T = torch.tensor([i for x in layouts for i in x.ids])
        is_audio_T = ids_T == AUDIO_ID
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        return cls(
            ids_T.masked_fill(is_audio_T, 0),
            torch.cat([torch.arange(n) for n in lengths]),
            is_audio_T.nonzero()[:, 0],
            torch.cat([torch.as_tensor(a) for a in audio]),  # audio embeddings are fed in order
            torch.tensor([kind in SIDE for x in layouts for kind in x.kinds]),
            Packing.of(lengths, views),
            tuple(starts),
        )

    def __len__(self) -> int:
        return len(self.ids_T)

    def to(self, device: torch.device) -> Sequences:
        return _moved(self, device)


@dataclass(frozen=True)
class Batch:
    """One forward of the student: E events, M transcription targets."""

    student: Sequences
    at_N: Tensor  # predicting positions in the row: events first, then targets
    tokens_N: Tensor
    groups_N: Tensor  # Group of an event, -1 for a target
    teacher_ED: Tensor | None  # the teacher's final hidden states, if a store has them
    teacher: Sequences | None  # otherwise what to run the teacher on,
    teacher_at_E: Tensor | None  # and where
    ids: tuple[str, ...]
    units: int

    def to(self, device: torch.device) -> Batch:
        return _moved(self, device)


T = TypeVar("T")


def _moved(batch: T, device: torch.device) -> T:
    changes = {f.name: getattr(batch, f.name) for f in fields(batch)}  # type: ignore[arg-type]
    changes = {k: v.to(device) for k, v in changes.items() if hasattr(v, "to")}
    return replace(batch, **changes)  # type: ignore[type-var]


def collate(
    pairs: Sequence[Pair],
    views: Sequence[View | None] | None = None,
    teacher: Sequence[Tensor] | None = None,
) -> Batch:
    """`views[i]`: what pair i's student sees; `teacher[i]`: its stored hidden states [events, D]."""
    student = Sequences.of([p.student for p in pairs], [p.example.audio_AD for p in pairs], views)
    at, tokens, groups, target_at, target_tokens, teacher_at = [], [], [], [], [], []
    teacher_start = 0
    for p, start in zip(pairs, student.starts, strict=True):
        at += [start + e.position for e in p.student.events]
        tokens += [e.token for e in p.student.events]
        groups += [int(g) for g in p.groups]
        target_at += [start + t[0] for t in p.targets]
        target_tokens += [t[1] for t in p.targets]
        teacher_at += [teacher_start + e.position for e in p.teacher.events]
        teacher_start += len(p.teacher)
    live = teacher is None
    return Batch(
        student,
        torch.tensor(at + target_at),
        torch.tensor(tokens + target_tokens),
        torch.tensor(groups + [-1] * len(target_at)),
        None if teacher is None else torch.cat([torch.as_tensor(t) for t in teacher]),
        Sequences.of([p.teacher for p in pairs], [p.example.audio_AD for p in pairs]) if live else None,
        torch.tensor(teacher_at) if live else None,
        tuple(p.example.id for p in pairs),
        sum(len(p.example.units) for p in pairs),
    )


def counts_of(pairs: Sequence[Pair]) -> Counts:
    return sum((Counts.of(p.groups, len(p.targets)) for p in pairs), Counts())


# Planning


def plan_joins(
    ids: Sequence[str], units: Sequence[int], prefixes: Sequence[tuple[int, ...]], config: DistillConfig
) -> list[tuple[int, ...]]:
    """Which utterances are laid end to end: tuples of indices, every index in exactly one; only utterances with the
    same prefix meet. Deterministic in the ids and the seed, so that the teacher's job and the training job plan the
    same streams."""
    order = list(range(len(ids)))
    if not config.join_units:
        return [(i,) for i in order]
    rng = random.Random(f"join/{config.seed}/{join_id(ids) if ids else ''}")
    rng.shuffle(order)
    cut = round(len(order) * config.join_share)
    streams: list[tuple[int, ...]] = [(i,) for i in order[cut:]]
    open_streams: dict[tuple[int, ...], tuple[list[int], int]] = {}  # by prefix: its indices and units so far
    for i in order[:cut]:
        stream, held = open_streams.get(prefixes[i], ([], 0))
        if stream and held + units[i] > config.join_units:
            streams.append(tuple(stream))
            stream, held = [], 0
        open_streams[prefixes[i]] = ([*stream, i], held + units[i])
    return streams + [tuple(stream) for stream, _ in open_streams.values()]


BUCKET_STEPS = 16
"""Sequences are sorted by length within windows of so many steps: like lengths meet, and the order stays random."""


def plan_epoch(units: Sequence[int], config: DistillConfig, epoch: int) -> list[list[int]]:
    """The steps of an epoch: lists of sequence indices, `global_batch` each, or `step_units` units in all."""
    rng = random.Random(f"epoch/{config.seed}/{epoch}")
    order = list(range(len(units)))
    rng.shuffle(order)
    mean = max(1.0, sum(units) / max(1, len(units)))
    per_step = config.global_batch if config.step_units is None else max(1, round(config.step_units / mean))
    window = per_step * BUCKET_STEPS
    steps: list[list[int]] = []
    for start in range(0, len(order), window):
        step: list[int] = []
        held = 0
        for i in sorted(order[start : start + window], key=lambda i: units[i]):
            full = len(step) == config.global_batch if config.step_units is None else held >= config.step_units
            if full:
                steps.append(step)
                step, held = [], 0
            step.append(i)
            held += units[i]
        steps.append(step)
    rng.shuffle(steps)
    return steps


def split_step(step: Sequence[int], lengths: Callable[[int], int], workers: int, micro: int) -> list[list[list[int]]]:
    """For each worker its forwards: lists of indices of at most `micro` positions (a longer sequence goes alone).

    Workers get like amounts. All have the same number of forwards, as collective operations need; a worker that has
    less to do is given empty lists.
    """
    order = sorted(step, key=lengths, reverse=True)
    shares: list[list[int]] = [[] for _ in range(workers)]
    for i in order:
        min(shares, key=lambda s: sum(lengths(j) for j in s)).append(i)
    out = []
    for share in shares:
        forwards: list[list[int]] = []
        for i in share:
            if forwards and sum(lengths(j) for j in forwards[-1]) + lengths(i) <= micro:
                forwards[-1].append(i)
            else:
                forwards.append([i])
        out.append(forwards)
    most = max(1, *(len(f) for f in out))
    return [f + [[] for _ in range(most - len(f))] for f in out]
