"""The books of one conversation: all that must outlive an engine or a session actor. No Ray, no torch.

Session actor and engine host both keep one, told the same things in the same order, so that each can make good the loss
of the other: a session actor that starts again copies its engine's, an engine rebuilds the cache from the session's.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from serve_apps.messages import SessionOptions, UnitReport

KEPT_REPORTS = 32
"""Results that were fetched stay for a client that lost its socket before it got them."""


@dataclass
class Book:
    id: str
    options: SessionOptions = field(default_factory=SessionOptions)
    token: str = ""  # whoever knows it may take the conversation up again
    opened_at: float = field(default_factory=time.time)
    settings: dict[str, Any] = field(default_factory=dict)  # in force, as the client is told
    journal: dict[str, Any] = field(default_factory=dict)  # `Journal.to_json()` when the conversation began
    notes: list[dict[str, Any]] = field(default_factory=list)  # the journal's record of each unit
    loop_state: dict[str, Any] | None = None
    next_position: int = 0
    audio: deque[np.ndarray] = field(default_factory=deque)  # the last units and what is not processed yet
    audio_start: int = 0  # sample index of the first one kept
    samples: int = 0  # heard in all
    inputs: int = 0  # number of the last input
    forced: set[int] = field(default_factory=set)  # units to come in which the client wants it to listen
    units: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    evicted: int = 0
    misses: int = 0
    unit_ms: float = 0.0
    last: UnitReport | None = None
    transcript: list[dict[str, Any]] = field(default_factory=list)
    reports: deque[UnitReport] = field(default_factory=deque)  # the last ones
    moves: list[dict[str, Any]] = field(default_factory=list)  # from engine to engine

    def begin(self, settings: dict[str, Any], journal: dict[str, Any]) -> None:
        self.settings, self.journal = settings, journal
        self.next_position = journal["next_position"]

    @property
    def samples_per_unit(self) -> int:
        return int(self.journal.get("samples_per_unit", 16_000))

    @property
    def backlog_s(self) -> float:
        """Seconds heard and not processed yet."""
        return self.samples / self.samples_per_unit - self.units

    def hear(self, number: int, pcm_S: np.ndarray, force_listen: bool) -> None:
        """Input `number`, from 1."""
        assert number == self.inputs + 1, f"input {number} after {self.inputs}: one is missing"
        self.inputs = number
        start, self.samples = self.samples, self.samples + len(pcm_S)
        if len(pcm_S):
            self.audio.append(np.array(pcm_S, np.float32))  # what arrives through the object store is read-only
        if force_listen:  # holds for the units that it completes, else for the one that it is part of
            first = start // self.samples_per_unit
            self.forced |= set(range(first, max(first + 1, self.samples // self.samples_per_unit)))

    def moved(self, old: str, new: str, exact: bool, seconds: float) -> None:
        move = {"unit": self.units, "from": old, "to": new, "exact": exact}
        self.moves.append({**move, "seconds": round(seconds, 3)})

    def take(self, report: UnitReport) -> bool:
        """The next unit is finished; False if it is known already."""
        if report.unit < self.units:
            return False
        assert report.unit == self.units, f"unit {report.unit} after {self.units} units"
        self.units += 1
        self.input_tokens += report.input_tokens
        self.output_tokens += report.output_tokens
        self.evicted += report.evicted
        self.misses += report.missed
        self.unit_ms += report.unit_ms
        self.forced.discard(report.unit)
        if report.transcript or report.response:
            line = {"unit": report.unit, "transcript": report.transcript, "response": report.response}
            self.transcript.append(line)
        if report.note is not None:
            self.notes.append(report.note["unit"])
            self.loop_state, self.next_position = report.note["loop_state"], report.note["next_position"]
            self._forget_audio()
        self.last = replace(report, speech_S=None, note=None)
        self.reports.append(replace(report, note=None))
        return True

    def unread(self, after: int) -> list[UnitReport]:
        return [r for r in self.reports if r.unit > after]

    def used(self, after: int) -> tuple[int, int]:
        """Tokens in and out, but for those of `unread(after)`."""
        rest = self.unread(after)
        return (
            self.input_tokens - sum(r.input_tokens for r in rest),
            self.output_tokens - sum(r.output_tokens for r in rest),
        )

    def fetched(self, unit: int) -> None:
        """Somebody has got everything up to `unit`: what is older than the last few is forgotten."""
        while self.reports and self.reports[0].unit <= unit - KEPT_REPORTS:
            self.reports.popleft()

    def to_journal(self) -> dict[str, Any]:
        """What `Journal.from_json` reads: the conversation after its last finished unit, and all audio since."""
        audio_S = np.concatenate(self.audio) if self.audio else np.zeros(0, np.float32)
        return {
            **self.journal,
            "units": self.notes,
            "loop_state": self.loop_state,
            "next_position": self.next_position,
            "samples": self.samples,
            "audio_start": self.audio_start,
            "audio": base64.b64encode(audio_S.astype("<f4").tobytes()).decode(),
        }

    def _forget_audio(self) -> None:
        start = (self.units - self.journal["config"]["audio_units_kept"]) * self.samples_per_unit
        while self.audio and self.audio_start + len(self.audio[0]) <= start:
            self.audio_start += len(self.audio.popleft())
        if self.audio and self.audio_start < start:
            self.audio[0] = self.audio[0][start - self.audio_start :].copy()
            self.audio_start = start

    def view(self) -> dict[str, Any]:
        """The part of `GET /v1/sessions/{id}` that outlives actors."""
        last = self.last
        return {
            "opened_at": self.opened_at,
            "system_prompt": self.options.system_prompt,
            "config": self.settings,
            "input": {"appends": self.inputs, "seconds": self.samples / self.samples_per_unit},
            "units": self.units,
            "memory": {
                "residents": last.residents if last else {},
                "total": last.total if last else 0,
                "peak": last.peak if last else 0,
                "evicted": self.evicted,
                "kv_bytes": last.kv_bytes if last else 0,
                "encoder_bytes": last.encoder_bytes if last else 0,
            },
            "timing": {
                "unit_ms_mean": self.unit_ms / self.units if self.units else 0.0,
                "unit_ms_last": last.unit_ms if last else 0.0,
                "deadline_misses": self.misses,
            },
            "moves": self.moves,
            "transcript": self.transcript,
        }
