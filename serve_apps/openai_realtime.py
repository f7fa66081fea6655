"""The OpenAI realtime dialect (`openai`, openai-agents, LiveKit, Pipecat and others speak it). No Ray, no sockets.

    client                                      server
    (connects)                               -> session.created
    session.update                           -> session.updated
    input_audio_buffer.append                -> speech_started, transcription deltas, speech_stopped ...
                                             -> response.created ... response.done
    response.cancel, conversation.item.* ... -> always answered

The model hears everything, all the time, and decides by itself when to speak (`semantic_vad` is the nearest name for
that); `response.create` asks it to. Where a client stops sending audio while something is under way, it hears silence.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from serve_apps.events import (
    Admitted,
    AnswerAudio,
    AnswerEnd,
    AnswerText,
    Close,
    Closed,
    Command,
    Enter,
    Event,
    Frame,
    Hear,
    Heard,
    Interrupt,
    Open,
    Opened,
    Queued,
    Read,
    Reply,
    UnitDone,
)
from serve_apps.limits import WireError
from serve_apps.messages import SAMPLE_RATE_IN, SessionOptions
from serve_apps.openai_audio import Ears, Voice
from serve_apps.openai_events import Talk
from serve_apps.openai_items import message
from serve_apps.openai_session import Settings

log = logging.getLogger("ray.serve")
SUBPROTOCOL = "realtime"
KEY_SUBPROTOCOL = "openai-insecure-api-key."
ROLES = ("user", "system")
"""Whose text is put before the model; what the assistant is to have said is shown, and not heard by the model."""
MAX_READ_CHARS = 500
MAX_ALONE = 60
"""Units that an answer may take while its client sends no audio, and so cannot interrupt it."""
SECOND = np.zeros(SAMPLE_RATE_IN, np.float32)


class OpenAI:
    """One client's side. `budget`: most resident positions after each unit (`?max_kv_tokens=`)."""

    subprotocol: str | None = SUBPROTOCOL
    waits_in_line = False  # its clients know no line: who finds no row is refused
    resumes = False
    resuming = False

    def __init__(self, model: str, query: Mapping[str, str] | None = None):
        query = query or {}
        budget = query.get("max_kv_tokens")
        if budget is not None and not (budget.isascii() and budget.isdecimal() and len(budget) < 9):
            raise WireError("invalid_config", f"max_kv_tokens={budget[:64]!r} must be a whole number")
        self._budget = None if budget is None else int(budget)
        self.settings = Settings(query.get("model") or model)
        self.talk = Talk(self.settings)
        self.session_id = ""
        self._opened = False
        self._ears: Ears | None = None
        self._voice = Voice()
        self._heard = 0  # samples that were put before the model
        self._from_client = False  # since the last unit, audio has come
        self._alone = 0  # units of this answer without any
        self._words = False  # of the user's, in this unit
        self._last: AnswerText | None = None

    # -- what the client sends ---------------------------------------------------------------------------------------

    def greet(self) -> Iterable[Command]:
        return [Enter(self._options())]

    def receive(self, frame: str | bytes) -> Iterator[Command]:
        """A client survives its mistakes: they are answered with an `error`."""
        event: Frame = {}
        try:
            event = parse(frame)
            handler = HANDLERS.get(event["type"])
            if handler is None:
                log.info("session %s: %r is passed over", self.session_id, event["type"][:64])
                return
            yield from handler(self, event)
        except WireError as error:
            yield Reply(self.error(error.code, error.message, event.get("event_id")))

    def update(self, event: Frame) -> Iterator[Command]:
        before = self.settings.instructions
        self.settings.update(event.get("session"))
        yield Reply(self.talk.frame("session.updated", session=self.shown()))
        if self._opened and self.settings.instructions != before:
            yield from self._read(self.settings.instructions)  # the prompt stands; what changes is told as text

    def append(self, event: Frame) -> Iterator[Command]:
        yield from self.open()
        yield from self._hear(event.get("audio"))

    def commit(self, event: Frame) -> Iterator[Command]:
        yield from self.open()
        yield from replies(self.talk.commit(self._ms, self._unit, by_client=True))
        if self.settings.turn_detection is None:
            yield self.silence()  # so that the unit of its last words ends

    def clear(self, event: Frame) -> Iterator[Command]:
        self._ears = None
        yield from replies(self.talk.clear())

    def create(self, event: Frame) -> Iterator[Command]:
        asked = event.get("response")
        asked = asked if isinstance(asked, dict) else {}
        if self.talk.answer is not None:
            message = f"the response {self.talk.answer.id} is still in progress; wait for response.done or cancel it"
            raise WireError("conversation_already_has_active_response", message)
        yield from self.open()
        metadata = asked.get("metadata")
        metadata = {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else None
        kinds = asked.get("output_modalities")
        speaks = self.settings.speaks if not isinstance(kinds, list) else "audio" in kinds
        yield from replies(self.talk.create(metadata, speaks))
        yield from self._read(asked.get("instructions"))
        yield self.silence()

    def cancel(self, event: Frame) -> Iterator[Command]:
        answer = self.talk.answer
        if answer is None or event.get("response_id") not in (None, answer.id):
            raise WireError("response_cancel_not_active", "Cancellation failed: no active response found")
        yield from replies(self.talk.cancel(self._voice.active, self._ms))
        yield Interrupt()

    def item_create(self, event: Frame) -> Iterator[Command]:
        given = event.get("item")
        if not isinstance(given, dict):
            raise WireError("invalid_event", "item must be an object")
        id = given.get("id")
        content = given.get("content")
        parts = [p for p in content if isinstance(p, dict)] if isinstance(content, list) else []
        item = {**given, "id": id if isinstance(id, str) and id else self.talk.new_id("item")}
        if given.get("type", "message") == "message":
            role = given.get("role") if isinstance(given.get("role"), str) else "user"
            item = message(item["id"], str(role), [{k: v for k, v in p.items() if k != "audio"} for p in parts])
        yield from replies(self.talk.add(item))
        if item.get("role") in ROLES:
            for part in parts:
                yield from self._read(part.get("text"))
                if part.get("audio"):
                    yield from self.append(part)

    def item_retrieve(self, event: Frame) -> Iterator[Command]:
        item = self.talk.items.get(event.get("item_id"))
        if item is None:
            raise WireError("item_retrieve_invalid_item_id", f"no item {event.get('item_id')!r} in this conversation")
        yield Reply(self.talk.frame("conversation.item.retrieved", item=item))

    def item_delete(self, event: Frame) -> Iterator[Command]:
        self.talk.items.delete(event.get("item_id"))
        yield Reply(self.talk.frame("conversation.item.deleted", item_id=str(event.get("item_id", ""))))

    def item_truncate(self, event: Frame) -> Iterator[Command]:
        end_ms = event.get("audio_end_ms")
        end_ms = int(end_ms) if isinstance(end_ms, int | float) and 0 <= end_ms < 1e9 else 0
        self.talk.items.truncate(event.get("item_id"), end_ms)
        where = {"item_id": str(event.get("item_id", "")), "content_index": 0, "audio_end_ms": end_ms}
        yield Reply(self.talk.frame("conversation.item.truncated", **where))

    def output_clear(self, event: Frame) -> Iterator[Command]:
        return iter(())  # of WebRTC: here the client holds what is played

    def close(self, event: Frame) -> Iterator[Command]:
        yield Close("user_stop")

    # -- what it is told ---------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> Iterator[Frame | Command]:
        talk = self.talk
        match event:
            case Admitted(session_id):
                self.session_id = session_id
                yield talk.frame("session.created", session=self.shown())
            case Queued():
                yield self.error(
                    "resource_exhausted", "every place is taken; call again later", kind="insufficient_quota"
                )
                yield Close("full")
            case Opened():
                self._opened = True
            case Heard(unit, text):
                self._words = True
                yield from talk.heard(unit, text, self._ms)
            case AnswerText(unit, turn, text, _):
                self._last = event
                yield from talk.says(turn, text, self._ms, unit)
            case AnswerAudio(_, turn, pcm_S):
                yield from talk.sounds(turn, pcm_S)
            case AnswerEnd(_, turn, interrupted):
                nothing_more = self._last is not None and not self._last.text
                yield from talk.falls_silent(turn, interrupted, nothing_more, self._voice.active, self._ms)
            case UnitDone(report):
                self._heard = max(self._heard, (report.unit + 1) * SAMPLE_RATE_IN)
                tokens = (report.input_tokens, report.output_tokens)
                yield from talk.unit_done(report.unit, *tokens, self._voice.active, self._words)
                yield from self._go_on()
                self._from_client = self._words = False
            case Closed(end):
                if end.failure is not None:
                    yield self.error(end.failure.code, end.failure.message, kind="server_error")

    # -- inside ------------------------------------------------------------------------------------------------------

    def shown(self) -> Frame:
        return self.settings.shown(self.session_id)

    def adopt(self, session_id: str) -> None:
        """A conversation that was begun elsewhere."""
        self.session_id, self._opened = session_id, True

    def open(self) -> Iterator[Command]:
        if not self._opened:
            self._opened = True
            yield Open(self._options())

    def _read(self, text: object) -> Iterator[Command]:
        """Text comes before the model as if it were said, so it has to be of a length that could be."""
        if isinstance(text, str) and text.strip():
            if len(text) > MAX_READ_CHARS:
                log.info("session %s: %d characters of text are not read to the model", self.session_id, len(text))
                return
            yield from self.open()
            yield Read(text)

    def _go_on(self) -> Iterator[Frame | Command]:
        """After a unit: an answer whose client sends nothing goes on over silence."""
        if self.talk.answer is None or self._from_client:
            self._alone = 0
            return
        self._alone += 1
        if self._alone < MAX_ALONE:
            yield self.silence()
        else:
            yield from self.talk.cut()
            yield Interrupt()

    def silence(self) -> Command:
        self._heard += len(SECOND)
        return Hear(SECOND)

    def error(self, code: str, message: str, cause: object = None, kind: str = "invalid_request_error") -> Frame:
        about = {"type": kind, "code": code, "message": message, "param": None}
        return self.talk.frame("error", error={**about, "event_id": cause if isinstance(cause, str) else None})

    def _options(self) -> SessionOptions:
        return SessionOptions(self.settings.instructions, self._budget, best_effort=True)

    def _hear(self, audio: object) -> Iterator[Command]:
        if self._ears is None or self._ears.kind != self.settings.heard:
            self._ears = Ears(self.settings.heard)
        pcm_S = self._ears.hear(audio)
        self._from_client = True
        self._heard += len(pcm_S)
        for at_ms in self._voice.hear(pcm_S):
            yield from replies(self.talk.voice(self._voice.active, at_ms, self._unit))
        if len(pcm_S):
            yield Hear(pcm_S)

    @property
    def _ms(self) -> int:
        return self._voice.ms

    @property
    def _unit(self) -> int:
        """That is being filled."""
        return self._heard // SAMPLE_RATE_IN


Handler = Callable[[OpenAI, Frame], Iterator[Command]]
HANDLERS: dict[str, Handler] = {
    "session.update": OpenAI.update,
    "input_audio_buffer.append": OpenAI.append,
    "input_audio_buffer.commit": OpenAI.commit,
    "input_audio_buffer.clear": OpenAI.clear,
    "output_audio_buffer.clear": OpenAI.output_clear,
    "response.create": OpenAI.create,
    "response.cancel": OpenAI.cancel,
    "conversation.item.create": OpenAI.item_create,
    "conversation.item.retrieve": OpenAI.item_retrieve,
    "conversation.item.delete": OpenAI.item_delete,
    "conversation.item.truncate": OpenAI.item_truncate,
    "session.close": OpenAI.close,
}


def with_key(headers: Mapping[str, str], offered: list[str]) -> dict[str, str]:
    """Headers by their names in lower case. A page cannot send any: its key comes as a subprotocol."""
    found = {name.lower(): value for name, value in headers.items()}
    for name in offered:
        if name.startswith(KEY_SUBPROTOCOL):
            found.setdefault("authorization", f"Bearer {name.removeprefix(KEY_SUBPROTOCOL)}")
    return found


def parse(frame: str | bytes) -> Frame:
    try:
        event: Any = json.loads(frame if isinstance(frame, str) else frame.decode())
    except (ValueError, RecursionError):
        raise WireError("invalid_json", "a frame must be one JSON object in UTF-8") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise WireError("invalid_event", "an event is a JSON object with a string `type`")
    return event


def replies(frames: Iterable[Frame]) -> Iterator[Command]:
    return map(Reply, frames)
