"""From a manifest's rows to training examples: the native sequence first, then the segments that go into it.

The frozen model streams each utterance as it would live, without side channel and without eviction, and what it fed is
the native sequence (`native="record"`).  A corpus that was written with its own native units can be taken at its word
(`native="manifest"`).  The words go to units by their acoustic ends.  Source: DESIGN.md section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from a2t.audio.files import read_audio
from a2t.data.alignment import DELTA, Alignment, words_to_units
from a2t.data.manifest import Manifest, Row
from a2t.distill.corpus import with_segments
from a2t.distill.sequences import Example
from a2t.duplex.conversation import Conversation, ConversationConfig
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import Engine, EngineConfig
from a2t.duplex.protocol import SpecialTokens
from a2t.duplex.unit_loop import Feed
from a2t.models.base import DuplexModel

RATE = 16_000
SETTLE_UNITS = 8
"""Silent units at most, after the last word, for an answer to end in: the next utterance of a joined stream should not
find a turn open."""
POSITIONS_PER_UNIT = 40


@dataclass
class Report:
    """What became of the rows. Nothing is left out silently."""

    rows: int = 0
    units: int = 0
    words: int = 0
    trailing_units: int = 0  # units after the audio, for the words of its last half second
    too_long: list[str] = field(default_factory=list)  # ids of rows that were left out
    past_end: list[str] = field(default_factory=list)  # words that end after the audio does, as "id: word"

    def __add__(self, other: Report) -> Report:
        return Report(
            self.rows + other.rows,
            self.units + other.units,
            self.words + other.words,
            self.trailing_units + other.trailing_units,
            self.too_long + other.too_long,
            self.past_end + other.past_end,
        )

    def __str__(self) -> str:
        parts = [
            f"{self.rows} utterances, {self.units} units, {self.words} words, {self.trailing_units} trailing units"
        ]
        for name, found in (
            ("too long, left out", self.too_long),
            ("words past the end of their audio", self.past_end),
        ):
            if found:
                parts.append(f"{len(found)} {name} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})")
        return "; ".join(parts)


def record(
    model: DuplexModel,
    manifest: str | Path,
    rows: Iterable[Row],
    native: Literal["record", "manifest"] = "record",
    delta: float = DELTA,
    max_seconds: float | None = 16.0,
    at_once: int = 8,
    duplex: DuplexConfig | None = None,
    report: Report | None = None,
) -> Iterator[Example]:
    """Examples of `rows` in their order, `at_once` streamed in a batch; counts go to `report`.

    Audio paths are relative to `manifest`.  A row's `extra["prompt"]` is its system prompt, the model's default
    otherwise.  `duplex`: how native tokens are decoded; by default the model's own rules, greedily.  Raises ValueError
    naming the row for audio that cannot be read, a word that the vocabulary lacks, or `native="manifest"` without
    native units.
    """
    report = Report() if report is None else report
    for group in _groups(rows, at_once, max_seconds, report):
        pcm = [read_audio(Manifest.audio_path(manifest, row)) for row in group]
        alignments = [words_to_units(row.words, row.units(), delta=delta) for row in group]
        prompts = [row.extra.get("prompt", model.default_prompt) for row in group]
        if native == "record":
            rules = duplex or DuplexConfig.of(model, greedy=True)
            streamed = _stream(model, pcm, [len(a.segments) for a in alignments], prompts, rules)
        else:
            streamed = _encode(model, group, pcm, alignments)
        for row, alignment, prompt, (natives, audio_AD) in zip(group, alignments, prompts, streamed, strict=True):
            yield _example(model, row, alignment, prompt, natives, audio_AD, report)


def known_rows(rows: Sequence[Row], encode: Callable[[str], object], leave_out: bool = False) -> tuple[list[Row], str]:
    """The rows whose words all have tokens, and what is to be said of the others.

    ValueError if there are others, unless they may be left out; it names their words, before hours of recording.
    """
    lacking = set()
    for word in {w.word for row in rows for w in row.words}:
        try:
            encode(word)
        except ValueError:
            lacking.add(word)
    known = [row for row in rows if lacking.isdisjoint(w.word for w in row.words)]
    if not lacking:
        return known, ""
    words = sorted(lacking)
    others = f"{len(rows) - len(known)} of {len(rows)} rows have words that the model does not know: "
    others += f"{', '.join(words[:20])}{f' and {len(words) - 20} more' if len(words) > 20 else ''}"
    if not leave_out:
        raise ValueError(f"{others}. --leave-out-unknown goes on without these rows")
    if not known:
        raise ValueError(f"{others}. None is left: another model, or other audio, is needed")
    return known, f"left out: {others}"


def _groups(rows: Iterable[Row], at_once: int, max_seconds: float | None, report: Report) -> Iterator[list[Row]]:
    group: list[Row] = []
    for row in rows:
        if max_seconds is not None and row.duration > max_seconds:
            report.too_long.append(row.id)
            continue
        group.append(row)
        if len(group) == at_once:
            yield group
            group = []
    if group:
        yield group


def _example(
    model: DuplexModel,
    row: Row,
    alignment: Alignment,
    prompt: str,
    natives: Sequence[Sequence[int]],
    audio_AD: Tensor,
    report: Report,
) -> Example:
    try:
        texts = [model.tokenizer.encode(" ".join(w.word for w in s)) if s else [] for s in alignment.segments]
    except ValueError as error:
        raise ValueError(f"row {row.id!r}: {error}") from error
    tokens = SpecialTokens.from_lookup(model.tokenizer.token_id)
    units, segments = with_segments(natives, texts, tokens.listen)
    assert len(audio_AD) == len(units) * model.encoder.embeddings_per_unit
    report.rows += 1
    report.units += len(units)
    report.words += sum(map(len, alignment.segments))
    report.trailing_units += alignment.trailing_units
    report.past_end += [f"{row.id}: {w.word}" for w in alignment.past_end]
    prefix = model.tokenizer.encode(prompt) if prompt else []
    return Example.build(row.id, prefix, units, segments, audio_AD)


Streamed = list[tuple[list[list[int]], Tensor]]
"""Native tokens by unit and audio embeddings [A, D], for each row."""


def _stream(
    model: DuplexModel, pcm: Sequence[np.ndarray], units: Sequence[int], prompts: Sequence[str], duplex: DuplexConfig
) -> Streamed:
    """The model listens to `units[i]` units of each row, then to silence until its turn has ended."""
    audio: dict[str, list[Tensor]] = {}
    natives: dict[str, list[list[int]]] = {}

    def heard(conversation: Conversation, feed: Feed, positions: Sequence[int], h_TD: Tensor) -> None:
        if feed.audio_AD is not None:
            audio[conversation.id].append(feed.audio_AD.detach().clone())

    capacity = (max(units) + SETTLE_UNITS) * POSITIONS_PER_UNIT + 1024
    engine = Engine(model, len(pcm), capacity, config=EngineConfig(side_channel_budget_s=None), observer=heard)
    open_: list[Conversation] = []
    for n, prompt in enumerate(prompts):
        config = ConversationConfig(
            budget=None,
            policy="unbounded",
            duplex=replace(duplex, side_channel=False),
            system_prompt=prompt,
            audio_units_kept=0,
        )
        conversation = engine.open(config, id=str(n))
        audio[conversation.id], natives[conversation.id] = [], []
        engine.push(conversation, _padded(pcm[n], units[n]))
        open_.append(conversation)
    waiting = {c.id: SETTLE_UNITS for c in open_}
    while True:
        for conversation, result, _ in engine.run():
            natives[conversation.id].append(list(result.native_ids))
        # Encoders that look ahead, and turns that are open, need more audio: silence.
        hungry = [c for n, c in enumerate(open_) if len(natives[c.id]) < units[n]]
        speaking = [c for c in open_ if c.loop.turn_open and waiting[c.id] and c not in hungry]
        for c in speaking:
            waiting[c.id] -= 1
        for c in hungry + speaking:
            engine.push(c, np.zeros(model.encoder.samples_per_unit, np.float32))
        if not hungry and not speaking:
            return [(natives[c.id], torch.cat(audio[c.id])) for c in open_]


@torch.no_grad()
def _encode(
    model: DuplexModel, rows: Sequence[Row], pcm: Sequence[np.ndarray], alignments: Sequence[Alignment]
) -> Streamed:
    """Native tokens from the manifest, embeddings from the encoder alone."""
    encoder = model.encoder
    natives = [_native_ids(model, row) for row in rows]
    units = [max(len(n), len(a.segments)) for n, a in zip(natives, alignments, strict=True)]
    states = [encoder.new_state() for _ in rows]
    for state, samples, count in zip(states, pcm, units, strict=True):
        state.push(_padded(samples, count))
        while state.units_ready < count:  # an encoder that looks ahead
            state.push(np.zeros(encoder.samples_per_unit, np.float32))
    parts: list[list[Tensor]] = [[] for _ in rows]
    for u in range(max(units)):
        active = [i for i, count in enumerate(units) if u < count]
        for i, e_AD in zip(active, encoder.encode([states[i] for i in active]), strict=True):
            parts[i].append(e_AD)
    return [(n, torch.cat(p)) for n, p in zip(natives, parts, strict=True)]


def _native_ids(model: DuplexModel, row: Row) -> list[list[int]]:
    if row.native is None:
        raise ValueError(f"row {row.id!r} has no native units; record them (native='record')")
    out = []
    for unit in row.native:
        ids = []
        for token in unit:
            found = token if isinstance(token, int) else model.tokenizer.token_id(token)
            if found is None:
                raise ValueError(f"row {row.id!r}: the vocabulary has no native token {token!r}")
            ids.append(found)
        out.append(ids)
    return out


def _padded(pcm_S: np.ndarray, units: int) -> np.ndarray:
    """At least `units` units of samples: silence follows."""
    return np.pad(pcm_S, (0, max(0, units * RATE - len(pcm_S)))).astype(np.float32)
