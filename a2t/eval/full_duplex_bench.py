"""Full-Duplex-Bench v1.0: the scoring rules of its four tasks.

Each task has a folder of samples, `{ID}/`.  A sample holds `output.json`, the recognised words of the model's own
speech on the input's clock, and the task's marks: `pause.json`, `turn_taking.json`, `interrupt.json`; for
back-channels `segments.json` with the voice activity of the output, `{"output_seconds", "segments": [{"start",
"end"}]}` (seconds; the benchmark takes it from silero-vad).

    {"text": "hello there", "chunks": [{"text": "hello", "timestamp": [1.02, 1.31]}, ...]}

Checked against what the official scorers say of made-up samples (tests/eval).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial.distance import jensenshannon

TAKEOVER_SECONDS, TAKEOVER_WORDS = 1.0, 3
"""Shorter than this with at most so many words is no takeover."""
SEGMENT_SECONDS, BACKCHANNEL_WORDS = 3.0, 2
BIN_SECONDS, BIN_FLOOR = 0.2, 1e-10


@dataclass(frozen=True)
class Chunk:
    """One recognised word (or phrase). `end` is None where the recogniser left it open."""

    text: str
    start: float
    end: float | None


@dataclass(frozen=True)
class Segment:
    start: float
    end: float


@dataclass(frozen=True)
class SampleScore:
    """`latency` (seconds, not below 0) only with a takeover; `frequency` (1/s), `distance`: back-channels only."""

    takeover: bool
    latency: float | None = None
    frequency: float | None = None
    distance: float | None = None


def takeover(chunks: Sequence[Chunk]) -> bool:
    """Whether the model took the turn. Words are counted by chunk; an open last end is that chunk's start."""
    if not chunks:
        return False
    last = chunks[-1]
    seconds = (last.start if last.end is None else last.end) - chunks[0].start
    return not (seconds < TAKEOVER_SECONDS and len(chunks) <= TAKEOVER_WORDS)


def score_pause(chunks: Sequence[Chunk]) -> SampleScore:
    return SampleScore(takeover(chunks))


def score_turn(chunks: Sequence[Chunk], since: float) -> SampleScore:
    """`since`: the second from which latency counts: the turn mark's start, or the interruption's end.

    A word before it counts as latency 0.  For an interruption `chunks` are those after the interruption only.
    """
    if not takeover(chunks):
        return SampleScore(False)
    return SampleScore(True, latency=max(0.0, chunks[0].start - since))


def score_backchannel(
    chunks: Sequence[Chunk], segments: Sequence[Segment], output_seconds: float, reference: Sequence[float]
) -> SampleScore:
    """`segments`: voice activity of the output in order; `reference`: people's distribution over the time bins.

    The last segment's verdict stands; a segment over 3 s takes the turn and ends the count.
    """
    verdict, counted = False, []
    for segment in segments:
        seconds = segment.end - segment.start
        if seconds > SEGMENT_SECONDS:
            verdict = True
            break
        words = sum(len(c.text.split()) for c in chunks if c.start < segment.end and _end(c) > segment.start)
        counted.append(segment)
        verdict = not (seconds < TAKEOVER_SECONDS and words <= BACKCHANNEL_WORDS)
    return SampleScore(
        verdict,
        frequency=len(counted) / output_seconds,
        distance=timing_distance(counted, output_seconds, reference),
    )


def timing_distance(segments: Sequence[Segment], output_seconds: float, reference: Sequence[float]) -> float:
    """Jensen-Shannon distance between when the model's and people's back-channels come; 1.0 without any."""
    if not segments:
        return 1.0
    bins = int(output_seconds / BIN_SECONDS) + 1
    counts = np.zeros(bins)
    for s in segments:
        counts[int(s.start / BIN_SECONDS) : int(s.end / BIN_SECONDS) + 1] += 1
    people = np.interp(np.linspace(0, 1, bins), np.linspace(0, 1, len(reference)), reference)
    p, q = counts + BIN_FLOOR, people + BIN_FLOOR
    return float(jensenshannon(p / p.sum(), q / q.sum()))


@dataclass(frozen=True)
class TaskScore:
    """Means over samples; latency over takeovers only. None where the task has no such figure."""

    task: str
    samples: Mapping[str, SampleScore]

    @property
    def takeover_rate(self) -> float:
        return float(np.mean([s.takeover for s in self.samples.values()]))

    @property
    def latency(self) -> float | None:
        return self._mean("latency")

    @property
    def frequency(self) -> float | None:
        return self._mean("frequency")

    @property
    def distance(self) -> float | None:
        return self._mean("distance")

    def _mean(self, name: str) -> float | None:
        values = [v for s in self.samples.values() if (v := getattr(s, name)) is not None]
        return float(np.mean(values)) if values else None


TASKS = ("pause_handling", "smooth_turn_taking", "user_interruption", "backchannel")
MARKS = {"smooth_turn_taking": "turn_taking.json", "user_interruption": "interrupt.json"}
"""The file of a task's sample that scoring reads beside the output."""


def score_task(task: str, folder: str | Path, reference: Mapping[str, Sequence[float]] | None = None) -> TaskScore:
    """Scores every sample folder of one task. `reference`: people's back-channel distributions by sample.

    Raises ValueError for an unknown task, an empty folder, a missing file or a missing reference.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is not one of {', '.join(TASKS)}")
    samples = sorted(p for p in Path(folder).iterdir() if p.name.isdigit())
    if not samples:
        raise ValueError(f"{folder} holds no sample folders (named by number) of {task}")
    return TaskScore(task, {p.name: _score_sample(task, p, reference) for p in samples})


def _score_sample(task: str, sample: Path, reference: Mapping[str, Sequence[float]] | None) -> SampleScore:
    chunks = [Chunk(c["text"], *c["timestamp"]) for c in _load(sample / "output.json")["chunks"]]
    if task == "pause_handling":
        return score_pause(chunks)
    if task == "smooth_turn_taking":
        return score_turn(chunks, since=_load(sample / MARKS[task])[0]["timestamp"][0])
    if task == "user_interruption":
        return score_turn(chunks, since=_load(sample / MARKS[task])[0]["timestamp"][1])
    if reference is None or sample.name not in reference:
        raise ValueError(f"sample {sample.name} has no reference distribution of back-channels: pass one for it")
    voice = _load(sample / "segments.json")
    segments = [Segment(s["start"], s["end"]) for s in voice["segments"]]
    return score_backchannel(chunks, segments, voice["output_seconds"], reference[sample.name])


def _end(chunk: Chunk) -> float:
    return chunk.start if chunk.end is None else chunk.end


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} is missing: write it before scoring (see this module's docstring)")
    return json.loads(path.read_text(encoding="utf-8"))
