"""What a client may ask of a conversation and what it is told, whatever dialect it speaks. No Ray, no sockets.

A dialect is a `Dialect`: it turns frames into commands and events into frames, and keeps no time and no sockets.
`call.py` carries both between one socket and one conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from serve_apps.messages import Failure, SessionEnd, SessionOptions, Ticket, UnitReport

Frame = dict[str, Any]  # one JSON object on the wire

# -- what a client asks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enter:
    """Join the waiting line for a new conversation; `Queued` ... `Admitted` follow. It opens with `options` if the
    client does not ask for others in time; without them it ends then."""

    options: SessionOptions | None = None


@dataclass(frozen=True)
class Open:
    """Start the conversation, once admitted; `Opened` follows."""

    options: SessionOptions = field(default_factory=SessionOptions)


@dataclass(frozen=True)
class Resume:
    """Instead of Enter and Open: take up a conversation whose socket was lost. What was missed after unit `after` is
    told again."""

    session_id: str
    token: str
    after: int = -1


@dataclass(frozen=True, eq=False)
class Hear:
    pcm_S: np.ndarray  # 16 kHz mono float32, finite; may be empty
    force_listen: bool = False


@dataclass(frozen=True)
class Read:
    """Typed text, put before the model as if it had been said."""

    text: str


@dataclass(frozen=True)
class Ask:
    """A typed question, answered from the transcript aside from the conversation; `Answered` follows."""

    text: str
    id: str = ""


@dataclass(frozen=True)
class Interrupt:
    """The model listens in the next unit, whatever it was saying."""


@dataclass(frozen=True)
class Close:
    reason: str


@dataclass(frozen=True)
class Reply:
    """A frame that the dialect answers with by itself."""

    frame: Frame


Command = Enter | Open | Resume | Hear | Read | Ask | Interrupt | Close | Reply

# -- what it is told -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Queued:
    ticket: Ticket


@dataclass(frozen=True)
class Admitted:
    """A row is kept for it."""

    session_id: str = ""
    resume_token: str = ""


@dataclass(frozen=True)
class Opened:
    session_id: str
    settings: dict[str, Any]  # in force, the budget under `max_kv_tokens`
    resume_token: str
    resumed: bool = False
    used: tuple[int, int] = (0, 0)  # tokens in and out before the units that follow


@dataclass(frozen=True)
class Heard:
    """What the side channel wrote down of a unit."""

    unit: int
    text: str


@dataclass(frozen=True)
class AnswerText:
    unit: int
    turn: int
    text: str  # pieces join as they are
    last: bool  # of this turn


@dataclass(frozen=True, eq=False)
class AnswerAudio:
    unit: int
    turn: int
    pcm_S: np.ndarray  # 24 kHz mono float32


@dataclass(frozen=True)
class AnswerEnd:
    unit: int
    turn: int
    interrupted: bool  # it was made to listen before it had finished


@dataclass(frozen=True)
class Listened:
    """The model only listened in this unit."""

    unit: int


@dataclass(frozen=True)
class UnitDone:
    """Last of a unit: residents by kind, evictions, unit time against its deadline."""

    report: UnitReport


@dataclass(frozen=True)
class StateChanged:
    state: str  # live, paused, moving, restoring


@dataclass(frozen=True)
class Answered:
    question: Ask
    text: str = ""
    failure: Failure | None = None


@dataclass(frozen=True)
class Closed:
    """The end, with the failure if it was one. Nothing follows."""

    end: SessionEnd


Event = (
    Queued | Admitted | Opened | Heard | AnswerText | AnswerAudio | AnswerEnd | Listened | UnitDone
    | StateChanged | Answered | Closed
)  # fmt: skip


class Dialect(Protocol):
    """One wire format, for one socket."""

    subprotocol: str | None
    waits_in_line: bool  # otherwise who finds no row is refused before the socket opens
    resumes: bool  # a client that lost its socket may come back

    def greet(self) -> Iterable[Command]:
        """What connecting itself asks for."""

    def receive(self, frame: str | bytes) -> Iterable[Command]:
        """What a client's frame asks for. Raises WireError for what breaks the dialect; it ends the conversation."""

    def tell(self, event: Event) -> Iterable[Frame | Command]:
        """The frames that tell a client of an event, and commands that follow from it; none, if this dialect has no
        words for it."""


class Turns:
    """Tells units apart into turns. An answer's number is that of the unit in which it began: none comes twice."""

    def __init__(self) -> None:
        self.turn = 0
        self.open = False

    def events(self, report: UnitReport) -> Iterator[Event]:
        """Everything of one unit, UnitDone last: when it arrives the unit is complete."""
        unit = report.unit
        if report.transcript:
            yield Heard(unit, report.transcript)
        if report.response and not self.open:
            self.turn, self.open = unit, True
        cut = report.listening and self.open
        ends = (report.end_of_turn or cut) and self.open
        if report.response or ends:
            yield AnswerText(unit, self.turn, report.response, ends)
        if report.speech_S is not None and len(report.speech_S):
            yield AnswerAudio(unit, self.turn, report.speech_S)
        if ends:
            yield AnswerEnd(unit, self.turn, cut)
            self.open = False
        if report.listening:
            yield Listened(unit)
        yield UnitDone(report)
