"""One training sequence, and what is done to it: positions stretched, silent frames left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np

from a2t.audio.conv_encoder import PER_UNIT
from a2t.duplex.protocol import Layout
from a2t.kv.kinds import Kind

MAX_POSITION = 13_000
"""Positions run on past everything that was evicted."""


@dataclass
class Sample:
    """One sequence of T positions. `audio_T` is the index of the audio embedding, -1 where `ids_T` is a token."""

    ids_T: np.ndarray
    audio_T: np.ndarray
    positions_T: np.ndarray
    targets_T: np.ndarray  # -1: not predicted
    weights_T: np.ndarray
    classes_T: np.ndarray
    bind: list[tuple[int, int, int]] = field(default_factory=list)  # position, key, colour
    guide: list[tuple[int, list[int]]] = field(
        default_factory=list
    )  # answering position, positions of the fact's value
    row: int = -1

    def __len__(self) -> int:
        return len(self.ids_T)


def stretch(rng: Random, layout: Layout) -> np.ndarray:
    """Positions with gaps before some units and an offset, as after evictions and long silences."""
    positions = np.arange(len(layout))
    if rng.random() < 0.7:
        markers = [i for i, k in enumerate(layout.kinds) if k is Kind.MARKER]
        reach, gaps = rng.choice([0, 300, 1500, 6000]), rng.randint(1, 4)
        room = max(0, MAX_POSITION - len(layout)) // gaps
        for _ in range(gaps):
            positions[rng.choice(markers) :] += rng.randint(0, min(reach // gaps, room))
        if rng.random() < 0.6:
            positions += rng.randint(0, max(0, MAX_POSITION - int(positions[-1])))
    return positions


def thin(rng: Random, sample: Sample, drop: float, blank: np.ndarray | None) -> Sample:
    """Leaves out `blank` frames with probability `drop`; positions stay."""
    if not drop or blank is None:
        return sample
    audio = sample.audio_T
    droppable = (audio >= 0) & (audio % PER_UNIT != PER_UNIT - 1) & (sample.targets_T < 0)
    droppable[droppable] = blank[audio[droppable]]
    noise = np.random.default_rng(rng.getrandbits(32)).random(len(audio))
    return _keep(sample, ~(droppable & (noise < drop)))


def _keep(sample: Sample, keep_T: np.ndarray) -> Sample:
    new = np.cumsum(keep_T) - 1
    bind = [(int(new[i]), k, c) for i, k, c in sample.bind if keep_T[i]]
    guide = [(int(new[i]), s) for i, src in sample.guide if (s := [int(new[j]) for j in src if keep_T[j]])]
    return Sample(
        sample.ids_T[keep_T],
        sample.audio_T[keep_T],
        sample.positions_T[keep_T],
        sample.targets_T[keep_T],
        sample.weights_T[keep_T],
        sample.classes_T[keep_T],
        bind,
        guide,
        sample.row,
    )
