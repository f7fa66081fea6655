"""What travels between gateway, session actor, placement and engine. No Ray, no torch: a session actor stays small."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

SAMPLE_RATE_IN = 16_000
SAMPLE_RATE_OUT = 24_000
SILENCE = np.zeros(0, np.float32)


@dataclass(frozen=True)
class SessionOptions:
    """What a client asks of a conversation; None leaves the server's default."""

    system_prompt: str | None = None
    budget: int | None = None  # `max_kv_tokens`: most resident positions after each unit
    temperature: float | None = None  # 0 is greedy
    length_penalty: float | None = None
    max_tokens: int | None = None  # response tokens a unit
    speech: bool = True
    text_tier: Literal["grow", "fold"] | None = None  # what happens where the text alone outgrows the budget
    best_effort: bool = False  # text that the model has no tokens for is left out; else it is an error


@dataclass(frozen=True)
class UnitReport:
    """One unit of a conversation, as the engine finished it."""

    unit: int
    listening: bool
    end_of_turn: bool
    decision: str
    transcript: str
    response: str  # appended to what this turn said before, spaces included
    segment_closed_by: str | None
    residents: dict[str, int]  # by kind
    peak: int
    evicted: int  # positions dropped after this unit
    unit_ms: float  # processing time: audio in to result, eviction included
    missed: bool  # that took longer than the deadline
    forwards: int
    positions: int  # fed
    kv_bytes: int
    encoder_bytes: int
    input_tokens: int
    output_tokens: int
    speech_S: np.ndarray | None = None  # 24 kHz mono float32
    note: dict[str, Any] | None = None  # what the journal wrote of it (`Book`)

    @property
    def total(self) -> int:
        return sum(self.residents.values())


@dataclass(frozen=True)
class Failure:
    """Why a conversation cannot go on; becomes one `error` event."""

    code: str
    message: str


@dataclass(frozen=True)
class SessionEnd:
    reason: str
    failure: Failure | None = None


@dataclass(frozen=True)
class Batch:
    """Answer of a long poll: reports after the unit asked for, and the end once everything before it was delivered."""

    reports: list[UnitReport] = field(default_factory=list)
    end: SessionEnd | None = None
    state: str = "live"  # of the session now: live, paused, moving, restoring, closed


@dataclass(frozen=True)
class Attached:
    """What a socket is told that takes up a conversation: its number as a reader, and where the conversation stands."""

    reader: int
    settings: dict[str, Any]
    appends: int  # inputs taken so far
    units: int
    used: tuple[int, int]  # tokens in and out, in the units before those that it will be told of


@dataclass(frozen=True)
class EngineLoad:
    """One engine as placement sees it. `unit_ms` is the engine's busy time for one unit of one conversation."""

    name: str
    node: str
    rows: int
    sessions: tuple[str, ...]  # holding or promised a row
    unit_ms: float
    draining: bool = False  # it gives its conversations away and takes none

    @property
    def rows_free(self) -> int:
        return self.rows - len(self.sessions)


@dataclass(frozen=True)
class Ticket:
    """Where a conversation stands: an engine's name once it has a row, else its place in the waiting line (from 1)."""

    engine: str | None = None
    node: str | None = None
    position: int = 0
    queue_length: int = 0
    estimated_wait_s: float | None = None


View = dict[str, Any]  # a session as the REST interface shows it


@dataclass(frozen=True)
class Parcel:
    """A conversation as it stands between two units, on its way to another engine: the two files of a snapshot, and
    what the engine's host knows of it."""

    files: dict[str, bytes]
    book: Any  # serve_apps.book.Book
    said_ids: tuple[int, ...]  # of the open turn
    force_listen: bool  # asked for with no audio yet
