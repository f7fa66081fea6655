"""Words with acoustic times to the units whose transcript segments teach them.

A word that ends at e goes to unit ceil((e + delta) / unit_seconds), counted from 1: delta seconds are left for the
encoder to hear it out.  Every word lies in exactly one segment.  Source: DESIGN.md section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from a2t.data.manifest import Word

DELTA = 0.5
EPSILON = 1e-9
"""Rounding of binary fractions: a word whose end plus delta is a whole second belongs to the unit that ends there."""


@dataclass(frozen=True)
class Alignment:
    segments: tuple[tuple[Word, ...], ...]  # one a unit, trailing units included
    audio_units: int  # units that have audio; those after them are fed silence
    past_end: tuple[Word, ...]  # words that no unit could take: their times contradict the audio's length

    @property
    def trailing_units(self) -> int:
        return len(self.segments) - self.audio_units


def unit_of(end: float, delta: float = DELTA, unit_seconds: float = 1.0) -> int:
    """Index from 0 of the unit that a word ending at `end` goes to."""
    return max(0, math.ceil((end + delta) / unit_seconds - EPSILON) - 1)


def words_to_units(
    words: Sequence[Word],
    units: int,
    unit_seconds: float = 1.0,
    delta: float = DELTA,
    trailing: int | None = None,
) -> Alignment:
    """Segments of a session of `units` units of audio.

    A word of the last `delta` seconds belongs after the audio; up to `trailing` units are added for such words
    (default: as many as `delta` can ask for).  Words later than that are returned in `past_end`, for the caller to
    count and report.  Within a segment words keep the order of `words`.
    Raises ValueError for `units` < 1, `unit_seconds` <= 0 or a negative `delta`.
    """
    if units < 1 or unit_seconds <= 0 or delta < 0:
        raise ValueError(f"units {units}, unit_seconds {unit_seconds}, delta {delta}: at least 1, above 0, at least 0")
    allowed = units + (math.ceil(delta / unit_seconds) if trailing is None else trailing)
    places = [unit_of(w.end, delta, unit_seconds) for w in words]
    count = max([units, *(p + 1 for p in places if p < allowed)])
    segments: list[list[Word]] = [[] for _ in range(count)]
    past_end = []
    for word, place in zip(words, places, strict=True):
        if place < count:
            segments[place].append(word)
        else:
            past_end.append(word)
    return Alignment(tuple(map(tuple, segments)), units, tuple(past_end))
