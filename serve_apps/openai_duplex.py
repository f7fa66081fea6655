"""`?duplex=1`: the OpenAI realtime dialect with vllm-omni's extension for full-duplex models. No Ray, no sockets.

Every event has a `server_event_seq`. A client that lost its socket opens another one with `?duplex=1&resume=1`, sends
`session.resume {session_id, resume_token, last_received_server_event_seq}`, and is told what it missed. The frames that
were sent are kept by the gateway that sent them; at another one the client is told `session.resync_required` instead,
and the conversation goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from serve_apps.events import (
    Admitted,
    AnswerText,
    Closed,
    Command,
    Event,
    Frame,
    Listened,
    Opened,
    Queued,
    Reply,
    Resume,
    StateChanged,
    UnitDone,
)
from serve_apps.limits import WireError
from serve_apps.openai_realtime import SUBPROTOCOL, OpenAI, parse

FRAMES_KEPT = 256
SESSIONS_KEPT = 64
CAPABILITIES = {"supports_session_resume": True, "supports_playback_ack": True, "supports_heartbeat": True}
RESUME_ERRORS = {
    "session_not_found": "session_resume_expired",
    "session_closed": "session_resume_expired",
    "resume_refused": "invalid_resume_token",
}


class Line:
    """What a conversation's next socket needs of its last one."""

    def __init__(self, dialect: OpenAI):
        self.dialect = dialect
        self.frames: deque[Frame] = deque(maxlen=FRAMES_KEPT)
        self.seq = 0
        self.unit = -1  # told completely
        self.begun = 0  # events told of the one after it
        self.generation = 0  # of sockets


class Kept:
    """The lines of conversations that may be taken up again here; the oldest are forgotten."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}

    def put(self, session: str, line: Line) -> None:
        self._lines[session] = line
        while len(self._lines) > SESSIONS_KEPT:
            del self._lines[next(iter(self._lines))]

    def get(self, session: str) -> Line | None:
        return self._lines.get(session)

    def drop(self, session: str) -> None:
        self._lines.pop(session, None)


class Duplex:
    subprotocol: str | None = SUBPROTOCOL
    waits_in_line = False
    resumes = True

    def __init__(self, model: str, query: Mapping[str, str], kept: Kept):
        self.resuming = query.get("resume") == "1"
        self._kept = kept
        self._line = Line(OpenAI(model, query))
        self._line.generation = self._generation = 1
        self._lost = False  # it is resumed where nothing is known of it
        self._since = 0  # the last event that the client has
        self._skip = 0

    def greet(self) -> Iterable[Command]:
        return [] if self.resuming else self._line.dialect.greet()

    def receive(self, frame: str | bytes) -> Iterator[Command]:
        if self._generation != self._line.generation:
            return  # another socket has it
        try:
            event = parse(frame)
            if event["type"] == "session.resume":
                yield self._resume(event)
                return
            if self.resuming:
                raise WireError("invalid_session_resume", "session.resume comes first on a socket with resume=1")
        except WireError as error:
            yield Reply(self._line.dialect.error(error.code, error.message))
            return
        match event["type"]:
            case "session.heartbeat":
                yield Reply(self._frame("session.heartbeat_ack", session_id=self._session))
            case "session.event_ack":
                self._acknowledged(event.get("server_event_seq"))
            case "playback.ack":
                yield from map(Reply, map(self._number, self._played(event)))
            case _:
                for command in self._line.dialect.receive(frame):
                    yield Reply(self._number(command.frame)) if isinstance(command, Reply) else command

    def tell(self, event: Event) -> Iterator[Frame | Command]:
        if isinstance(event, Closed):
            yield from self._closed(event)
            return
        if isinstance(event, Opened) and event.resumed:
            yield from self._resumed(event)
            return
        if self._told(event):
            return
        for answer in self._line.dialect.tell(event):
            if not isinstance(answer, dict):
                yield answer
            elif isinstance(event, Admitted):
                yield self._created(answer, event)
            else:
                yield self._number(answer)
        if isinstance(event, AnswerText) and event.text:
            yield self._number(self._frame("response.speak", unit=event.unit))
        elif isinstance(event, Listened):
            yield self._number(self._frame("response.listen", unit=event.unit))
        if isinstance(event, UnitDone):
            self._line.unit, self._line.begun = event.report.unit, 0
        elif not isinstance(event, Admitted | Opened | Queued | StateChanged):
            self._line.begun += 1

    def _told(self, event: Event) -> bool:
        """Whether the last socket was told of it: a conversation that is taken up begins with a whole unit."""
        unit = event.report.unit if isinstance(event, UnitDone) else getattr(event, "unit", None)
        if unit is None or unit > self._line.unit + 1 or not self._skip:
            return unit is not None and unit <= self._line.unit
        self._skip -= unit == self._line.unit + 1
        return True

    @property
    def _session(self) -> str:
        return self._line.dialect.session_id

    def _frame(self, kind: str, **fields: Any) -> Frame:
        return self._line.dialect.talk.frame(kind, **fields)

    def _number(self, frame: Frame) -> Frame:
        self._line.seq += 1
        frame = {**frame, "server_event_seq": self._line.seq}
        self._line.frames.append(frame)
        return frame

    def _created(self, frame: Frame, event: Admitted) -> Frame:
        self._kept.put(event.session_id, self._line)
        fields = {"session_id": event.session_id, "resume_token": event.resume_token, "attachment_generation": 1}
        return {**frame, **fields, "session": {**frame["session"], "capabilities": CAPABILITIES}}

    def _resume(self, event: Frame) -> Command:
        session, token, since = (event.get(k) for k in ("session_id", "resume_token", "last_received_server_event_seq"))
        if not self.resuming:
            raise WireError("session_resume_conflict", "session.resume comes first, on a socket with duplex=1&resume=1")
        if not isinstance(session, str) or not isinstance(token, str) or not isinstance(since, int) or since < 0:
            message = "session.resume requires session_id, resume_token and last_received_server_event_seq"
            raise WireError("invalid_session_resume", message)
        self.resuming, self._since = False, since
        line = self._kept.get(session)
        self._lost = line is None or not self._has_all_since(line)
        return Resume(session, token, -1 if line is None else line.unit)

    def _has_all_since(self, line: Line) -> bool:
        return self._since >= line.seq or (bool(line.frames) and line.frames[0]["server_event_seq"] <= self._since + 1)

    def _resumed(self, event: Opened) -> Iterator[Frame]:
        """Now its token has been checked."""
        line = self._kept.get(event.session_id)
        if line is not None:
            self._line = line
            self._skip = line.begun
        else:
            self._line.dialect.adopt(event.session_id)
            self._line.seq = self._since
            self._kept.put(event.session_id, self._line)
        self._line.generation += 1
        self._generation = self._line.generation
        fields = {"session_id": event.session_id, "resume_token": event.resume_token}
        session = {**self._line.dialect.shown(), "capabilities": CAPABILITIES}
        yield self._frame("session.resumed", **fields, session=session, attachment_generation=self._generation)
        if self._lost:
            yield self._frame("session.resync_required", session_id=event.session_id, reason="journal_gap")
        else:
            yield from [f for f in self._line.frames if f["server_event_seq"] > self._since]

    def _acknowledged(self, seq: object) -> None:
        frames = self._line.frames
        while isinstance(seq, int) and frames and frames[0]["server_event_seq"] <= seq:
            frames.popleft()

    def _played(self, event: Frame) -> Iterator[Frame]:
        """Late ones, of answers that are long over, mean nothing any more."""
        talk = self._line.dialect.talk
        item = talk.item_of.get(str(event.get("response_id")))
        played = event.get("played_ms")
        if item is None or not isinstance(played, int | float):
            return
        kept = event.get("committed_ms")
        heard_ms = {"played_ms": int(played), "committed_ms": int(kept if isinstance(kept, int | float) else played)}
        yield self._frame("playback.acknowledged", response_id=event["response_id"], item_id=item, **heard_ms)
        if event.get("truncate"):
            end_ms = heard_ms["committed_ms"]
            talk.items.truncate(item, end_ms)
            yield self._frame("conversation.item.truncated", item_id=item, content_index=0, audio_end_ms=end_ms)

    def _closed(self, event: Closed) -> Iterator[Frame]:
        failure = event.end.failure
        if event.end.reason == "replaced":
            yield self._frame("session.replaced", session_id=self._session, attachment_generation=self._generation)
        elif failure is not None and failure.code in RESUME_ERRORS:
            yield self._line.dialect.error(RESUME_ERRORS[failure.code], failure.message)
        else:
            self._kept.drop(self._session)
            if event.end.reason == "idle_timeout":
                yield self._frame("session.expired", session_id=self._session, reason="idle_timeout")
            elif failure is not None:
                yield from (f for f in self._line.dialect.tell(event) if isinstance(f, dict))
            else:
                yield self._frame("session.closed", session_id=self._session, reason=event.end.reason)


def openai_dialect(model: str, query: Mapping[str, str], kept: Kept) -> OpenAI | Duplex:
    return Duplex(model, query, kept) if query.get("duplex") == "1" else OpenAI(model, query)
