"""The embedded suite: every figure of ten-minute conversations in the embedded world, from scripts and raw results.

Definitions.  Unit u covers the seconds [u, u + 1) and decides at u + 1.  The unit of a moment t is the first that
decides at or after t: `unit_of(t)` = ceil(t) - 1.

- **Onset**: a unit that speaks while no turn was open before it.
- **Claimed**: each turn that has an answer claims the first free onset in the units unit_of(end) .. + 2.  A claimed
  onset is a rightful answer and counts nowhere else.
- **Takeover at turn ends**: the fraction of questions, commands, greetings and requests that claim an onset.
- **Takeover in pauses**: the fraction of pauses of at least 0.7 s inside a user's sentence with a free onset in a unit
  that hears any of the pause (int(start) .. unit_of(end)).
- **Takeover on back-channels**: the fraction of back-channels with a free onset in the units int(start) ..
  unit_of(end) + 2.
- **Recall**: a question is right if the value's words stand, in a row, in what is said in unit_of(end) .. + 3.  Only
  facts stated in the session and the first question about each count; the distance runs from the end of the fact to
  the start of the question, and `recall` is over those beyond 3 minutes.
- **Order**: right if, of the two people asked about, the right one is named first (live: within the same units as
  recall; from text: in the answer).
- **Emission delay**: end of the unit that wrote a word + that unit's processing time - the word's acoustic end, over
  correctly written words.
- **By minute**: a lost or wrong word counts in the minute of its acoustic end, a word too many in that of its unit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from a2t.data.manifest import Row, Turn
from a2t.eval.latency import Latency, unit_latency
from a2t.eval.streaming import SessionRun, UnitRun
from a2t.eval.wer import TimedWord, WordErrors, align_in_time, word_errors

NORMALISER = "nfkc-lower"
PAUSE_SECONDS = 0.7
ANSWER_UNITS, RECALL_UNITS = 2, 3
"""How many units after the one in which a turn ends still count."""
RECALL_SECONDS = 180.0
DISTANCE_EDGES = (0.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 600.0)
STATEMENTS = frozenset({"fact", "arrival", "chat"})


@dataclass(frozen=True)
class Rate:
    """`hits` of `of`; rates of several sessions add up."""

    hits: int = 0
    of: int = 0

    @property
    def value(self) -> float | None:
        return self.hits / self.of if self.of else None

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.hits + other.hits, self.of + other.of)

    @classmethod
    def count(cls, answers: Iterable[bool]) -> Rate:
        seen = list(answers)
        return cls(sum(seen), len(seen))


def unit_of(seconds: float) -> int:
    return max(0, math.ceil(seconds - 1e-6) - 1)


def onsets(units: Sequence[UnitRun]) -> list[int]:
    """Units that start to speak."""
    return [u for u, run in enumerate(units) if run.speaks and not (u and units[u - 1].leaves_turn_open)]


@dataclass(frozen=True)
class TurnTaking:
    """`statement`: facts and chatter after which it speaks though nobody asked (windows as for back-channels, from the
    end); `stopped`: of the interruptions that met an open turn, those after which it was closed within 2 units."""

    pause: Rate = Rate()
    backchannel: Rate = Rate()
    turn_end: Rate = Rate()
    statement: Rate = Rate()
    stopped: Rate = Rate()

    def __add__(self, other: TurnTaking) -> TurnTaking:
        return TurnTaking(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))


def turn_taking(row: Row, run: SessionRun) -> TurnTaking:
    free = onsets(run.units)
    answered = []
    for turn in sorted((t for t in row.turns if t.answer is not None), key=lambda t: t.end):
        end = unit_of(turn.end)
        claim = next((u for u in free if end <= u <= end + ANSWER_UNITS), None)
        answered.append(claim is not None)
        if claim is not None:
            free.remove(claim)

    def speaks(first: int, last: int) -> bool:
        return any(first <= u <= last for u in free)

    def after(turn: Turn, first: int) -> bool:
        return speaks(first, unit_of(turn.end) + ANSWER_UNITS)

    return TurnTaking(
        pause=Rate.count(speaks(int(start), unit_of(end)) for start, end in pauses(row)),
        backchannel=Rate.count(after(t, int(t.start)) for t in row.turns if t.kind == "backchannel"),
        turn_end=Rate.count(answered),
        statement=Rate.count(after(t, unit_of(t.end)) for t in row.turns if t.kind in STATEMENTS),
        stopped=Rate.count(_stopped(row, run.units)),
    )


def pauses(row: Row) -> Iterator[tuple[float, float]]:
    """Pauses inside users' sentences that are long enough to count."""
    for turn in row.turns:
        for start, end in turn.extra.get("pauses", ()):
            if end - start >= PAUSE_SECONDS - 1e-6:
                yield start, end


def _stopped(row: Row, units: Sequence[UnitRun]) -> Iterator[bool]:
    for turn in row.turns:
        first, last = int(turn.start), unit_of(turn.end) + ANSWER_UNITS
        if turn.kind == "interruption" and first < len(units) and units[first].leaves_turn_open:
            yield any(not u.leaves_turn_open for u in units[first : last + 1])


@dataclass(frozen=True)
class Recalled:
    """One question about a fact: how long ago it was stated (s), and whether the answer was right."""

    distance: float
    right: bool


def recall(row: Row, run: SessionRun) -> list[Recalled]:
    out: list[Recalled] = []
    asked: set[tuple[str, ...]] = set()
    for turn in row.turns:
        if turn.kind != "question" or turn.extra.get("source") is None:
            continue
        key = tuple(turn.extra["key"])
        if key not in asked:
            asked.add(key)
            right = _holds(_said(run, turn), turn.extra["value"].split())
            out.append(Recalled(turn.start - row.turns[turn.extra["source"]].end, right))
    return out


def order_live(row: Row, run: SessionRun) -> Rate:
    return Rate.count(_orders(_said(run, t), t) for t in row.turns if t.kind == "order_question")


def order_from_text(row: Row, run: SessionRun) -> Rate:
    """Over the questions that were asked as text in this run."""
    return Rate.count(_orders(answer.split(), row.turns[i]) for i, answer in run.text_answers.items())


def _said(run: SessionRun, turn: Turn) -> list[str]:
    end = unit_of(turn.end)
    return [w for u in run.units[end : end + RECALL_UNITS + 1] for w in u.response.split()]


def _holds(words: Sequence[str], value: Sequence[str]) -> bool:
    return any(list(words[i : i + len(value)]) == list(value) for i in range(len(words) - len(value) + 1))


def _orders(words: Sequence[str], turn: Turn) -> bool:
    people = set(turn.extra["key"][1:])
    return next((w for w in words if w in people), None) == turn.extra["value"]


def spoken(row: Row) -> list[TimedWord]:
    return [TimedWord(w.word, w.end) for w in row.words]


def written(run: SessionRun) -> list[TimedWord]:
    """Transcribed words; `time` is when they were out."""
    return [
        TimedWord(w, u + 1 + unit.unit_ms / 1000) for u, unit in enumerate(run.units) for w in unit.transcript.split()
    ]


@dataclass
class Transcription:
    """Of one system over its sessions. `by_minute[m]`: word errors over reference words; `delays` in seconds."""

    errors: WordErrors
    by_minute: list[Rate] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)


def transcription(pairs: Sequence[tuple[Row, SessionRun]]) -> Transcription:
    said, wrote = [spoken(row) for row, _ in pairs], [written(run) for _, run in pairs]
    texts = [[" ".join(w.word for w in words) for words in side] for side in (said, wrote)]
    out = Transcription(word_errors(texts[0], texts[1], NORMALISER))
    minutes: dict[int, Rate] = defaultdict(Rate)
    for (row, _), ref, hyp in zip(pairs, said, wrote, strict=True):
        last = max(0, math.ceil(row.duration / 60 - 0.5) - 1)  # a few seconds over belong to the last minute
        for step in align_in_time(ref, hyp):
            if step.reference is not None:
                at, word = ref[step.reference].time, 1
            else:
                assert step.hypothesis is not None
                at, word = hyp[step.hypothesis].time - 1, 0
            minutes[min(last, int(at // 60))] += Rate(int(not step.correct), word)
            if step.correct and step.hypothesis is not None:
                out.delays.append(hyp[step.hypothesis].time - at)
    out.by_minute = [minutes[m] for m in range(max(minutes, default=-1) + 1)]
    return out


@dataclass
class Figures:
    """Everything about one system. `transcript` is None for a system without side channel."""

    sessions: int
    peaks: list[int]
    largest_unit: int
    latency: Latency
    turns: TurnTaking
    recalled: list[Recalled]
    order_live: Rate
    order_text: Rate
    transcript: Transcription | None
    cut_by_budget: int

    @property
    def recall(self) -> Rate:
        return Rate.count(r.right for r in self.recalled if r.distance > RECALL_SECONDS)

    def recall_by_distance(self) -> list[tuple[float, float, Rate]]:
        """(from, to, rate) over `DISTANCE_EDGES`, seconds."""
        return [
            (a, b, Rate.count(r.right for r in self.recalled if a < r.distance <= b))
            for a, b in pairwise(DISTANCE_EDGES)
        ]


def figures(pairs: Sequence[tuple[Row, SessionRun]], side_channel: bool = True) -> Figures:
    """Of one system over all its sessions; ValueError without any."""
    if not pairs:
        raise ValueError("no session was streamed, so there is nothing to score")
    units = [u for _, run in pairs for u in run.units]
    return Figures(
        sessions=len(pairs),
        peaks=[run.peak for _, run in pairs],
        largest_unit=max(u.positions for u in units),
        latency=unit_latency(u.unit_ms for u in units),
        turns=sum((turn_taking(row, run) for row, run in pairs), TurnTaking()),
        recalled=[r for row, run in pairs for r in recall(row, run)],
        order_live=sum((order_live(row, run) for row, run in pairs), Rate()),
        order_text=sum((order_from_text(row, run) for row, run in pairs), Rate()),
        transcript=transcription(pairs) if side_channel else None,
        cut_by_budget=sum(u.closed_by == "budget" for u in units),
    )


def results(systems: dict[str, Figures]) -> dict[str, float | int | None]:
    """The flat keys of results.json. None where the system was not run or nothing was there to count.

    Without prefix or suffix: the student at B = 4,000 (`a2t`).  Rates are fractions.
    """
    ours, base, unbounded = systems.get("a2t"), systems.get("base"), systems.get("unbounded")
    transcript = ours.transcript if ours else None
    minutes, delays = (transcript.by_minute, transcript.delays) if transcript else ([], [])
    latency = ours.latency if ours else None

    def wer(name: str) -> float | None:
        f = systems.get(name)
        return f.transcript.errors.rate if f and f.transcript else None

    def recalled(name: str) -> float | None:
        return systems[name].recall.value if name in systems else None

    out: dict[str, float | int | None] = {
        "wer": wer("a2t"),
        "wer_unbounded": wer("unbounded"),
        "wer_floor": wer("floor"),
        "peak_residents": max(ours.peaks) if ours else None,
        "peak_residents_unbounded": max(unbounded.peaks) if unbounded else None,
        "recall": recalled("a2t"),
        "recall_base": recalled("base"),
        "recall_unbounded": recalled("unbounded"),
        "recall_streaming_llm": recalled("streaming_llm"),
        "wer_first_minute": minutes[0].value if minutes else None,
        "wer_last_minute": minutes[-1].value if minutes else None,
        "order_qa": ours.order_text.value if ours else None,
        "order_qa_native": base.order_live.value if base else None,
    }
    for suffix, name in (("", "a2t"), ("_base", "base"), ("_no_distillation", "no_distillation")):
        for kind in ("pause", "backchannel", "turn_end"):
            out[f"takeover_{kind}{suffix}"] = getattr(systems[name].turns, kind).value if name in systems else None
    out |= {
        "emission_delay_mean_s": float(np.mean(delays)) if delays else None,
        "emission_delay_max_s": max(delays, default=None),
        "unit_ms_mean": latency.mean if latency else None,
        "unit_ms_p99": latency.p99 if latency else None,
        "units": latency.units if latency else None,
        "deadline_misses": latency.misses if latency else None,
    }
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in out.items()}
