"""The realtime dialect that MiniCPM-o's clients speak (PyPI: openbmb-realtime). No Ray, no sockets.

    server                                     client
    session.queued / session.queue_update ...
    session.queue_done                      -> session.init
    session.created                         -> input.append ... session.close
    response.* / transcription / a2t.unit / usage ... session.closed

Of this project's own, which stock clients skip: `a2t.unit`, last of each unit (residents by kind, evictions, unit time
against its deadline; the cumulative `usage` on it is taken by stock clients), `a2t.state`, `session.resumed`, and from
the client `input.text` and `input.question`.  A socket that asks for `?session=ID&token=T&after=N` takes up the
conversation of a lost one: `token` is the `resume_token` of `session.created`, N the last unit that arrived.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from serve_apps.events import (
    Admitted,
    AnswerAudio,
    Answered,
    AnswerEnd,
    AnswerText,
    Ask,
    Close,
    Closed,
    Command,
    Enter,
    Event,
    Frame,
    Hear,
    Heard,
    Listened,
    Open,
    Opened,
    Queued,
    Read,
    Resume,
    StateChanged,
    UnitDone,
)
from serve_apps.limits import MAX_AUDIO_S, MAX_FRAME_CHARS, MAX_PROMPT_CHARS, WireError
from serve_apps.messages import SAMPLE_RATE_IN, SessionEnd, SessionOptions, UnitReport

SUBPROTOCOL = "map.realtime"
DEADLINE_MS = 1000.0
LOUDEST = 64.0  # float PCM lives in [-1, 1]; far beyond it are integers sent as floats


def parse_client_event(frame: str | bytes) -> Command:
    """One text frame from the client. Raises WireError for everything that is not a well-formed event."""
    if len(frame) > MAX_FRAME_CHARS:
        raise WireError("frame_too_large", f"{len(frame)} characters; send at most {MAX_AUDIO_S:.0f} s in a frame")
    try:
        event = json.loads(frame if isinstance(frame, str) else frame.decode())
    except (ValueError, RecursionError):
        raise WireError("invalid_json", "a frame must be one JSON object in UTF-8") from None
    if not isinstance(event, dict):
        raise WireError("invalid_event", f"an event is a JSON object, not {_json_type(event)}")
    kind = event.get("type")
    if not isinstance(kind, str):
        raise WireError("invalid_event", "an event needs a string `type`")
    if kind == "input.append":
        return _parse_append(event)
    if kind == "session.init":
        return Open(_parse_init(event))
    if kind == "session.close":
        reason = event.get("reason")
        return Close(_text(reason, "reason", 256) if isinstance(reason, str) and reason else "user_stop")
    if kind == "input.text":
        return Read(_text(event.get("text"), "text", MAX_PROMPT_CHARS))
    if kind == "input.question":
        return Ask(_text(event.get("text"), "text", MAX_PROMPT_CHARS), _text(event.get("id", ""), "id", 256))
    raise WireError("unknown_event_type", f"{kind[:64]!r}: send session.init, input.append or session.close")


def _parse_append(event: Frame) -> Hear:
    body = _object(event.get("input"), "input")
    if body.get("video_frames"):
        raise WireError("unsupported_input", "this server hears audio only; leave video_frames out")
    force = body.get("force_listen", False)
    if not isinstance(force, bool):
        raise WireError("invalid_event", "input.force_listen must be true or false")
    audio = body.get("audio", "")
    if not isinstance(audio, str):
        raise WireError("invalid_audio", f"input.audio must be a base64 string, not {_json_type(audio)}")
    try:
        raw = base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError):
        raise WireError("invalid_audio", "input.audio is not base64") from None
    if len(raw) % 4:
        raise WireError("invalid_audio", f"{len(raw)} bytes is no whole number of 32-bit float samples")
    pcm_S = np.frombuffer(raw, dtype="<f4").astype(np.float32, copy=False)
    if (seconds := len(pcm_S) / SAMPLE_RATE_IN) > MAX_AUDIO_S:
        raise WireError("frame_too_large", f"{seconds:.0f} s of audio; send at most {MAX_AUDIO_S:.0f} s in a frame")
    if len(pcm_S) and not (np.abs(pcm_S) <= LOUDEST).all():  # also false for NaN
        raise WireError("invalid_audio", "samples must be finite floats in [-1, 1]: 16 kHz mono float32 PCM")
    return Hear(pcm_S, force)


def _parse_init(event: Frame) -> SessionOptions:
    payload = _object(event.get("payload", {}), "payload")
    config = _object(payload.get("config") or {}, "payload.config")
    prompt = payload.get("system_prompt")
    speech = config.get("tts_enabled")
    if speech is not None and not isinstance(speech, bool):
        raise WireError("invalid_config", "tts_enabled must be true or false")
    return SessionOptions(
        system_prompt=None if prompt is None else _text(prompt, "system_prompt", MAX_PROMPT_CHARS),
        budget=_whole(config, "max_kv_tokens", 0, 10**8),
        temperature=_number(config, "temperature", 0.0, 10.0),
        length_penalty=_number(config, "length_penalty", 0.01, 100.0),
        max_tokens=_whole(config, "max_tokens", 1, 10**6),
        speech=speech is not False,
    )


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _object(value: object, name: str) -> Frame:
    if not isinstance(value, dict):
        raise WireError("invalid_event", f"{name} must be an object, not {_json_type(value)}")
    return value


def _text(value: object, name: str, limit: int) -> str:
    if not isinstance(value, str):
        raise WireError("invalid_config", f"{name} must be a string, not {_json_type(value)}")
    if len(value) > limit:
        raise WireError("invalid_config", f"{name} has {len(value)} characters; the limit is {limit}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise WireError("invalid_config", f"{name} holds half a surrogate pair") from None
    return value


def _number(config: Frame, name: str, low: float, high: float) -> float | None:
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise WireError("invalid_config", f"{name} must be a number from {low:g} to {high:g}")
    return float(value)


def _whole(config: Frame, name: str, low: int, high: int) -> int | None:
    value = _number(config, name, low, high)
    if value is None:
        return None
    if not math.isclose(value, round(value)):
        raise WireError("invalid_config", f"{name} must be a whole number, not {value:g}")
    return round(value)


class Realtime:
    """The server's side for one socket: event ids and cumulative usage live here."""

    subprotocol: str | None = SUBPROTOCOL
    waits_in_line = True
    resumes = True

    def __init__(self, model: str, query: Mapping[str, str] | None = None):
        self.session_id = ""
        self.model = model
        self._query = query or {}
        self._events = 0
        self._queued_before = False
        self._input_tokens = 0
        self._output_tokens = 0

    def greet(self) -> Iterable[Command]:
        if (session := self._query.get("session")) is None:
            return [Enter()]
        after = self._query.get("after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 12:
            raise WireError("invalid_event", f"after={after[:64]!r} must be the number of the last unit that arrived")
        return [Resume(session, self._query.get("token", ""), int(after))]

    def receive(self, frame: str | bytes) -> Iterable[Command]:
        return [parse_client_event(frame)]

    def tell(self, event: Event) -> Iterator[Frame]:
        match event:
            case Queued(ticket):
                kind = "session.queue_update" if self._queued_before else "session.queued"
                self._queued_before = True
                place = {"position": ticket.position, "queue_length": ticket.queue_length}
                yield self._frame(kind, **place, estimated_wait_s=ticket.estimated_wait_s)
            case Admitted():
                yield self._frame("session.queue_done")
            case Opened():
                yield self._opened(event)
            case Heard(unit, text):
                kind = "conversation.item.input_audio_transcription.completed"
                yield self._frame(kind, transcript=text, unit=unit)
            case AnswerText(unit, turn, text, last):
                fields = {"response_id": self._response(turn), "text": text, "end_of_turn": last, "unit": unit}
                yield self._frame("response.output_text.delta", **fields)
            case AnswerAudio(unit, turn, pcm_S):
                audio = base64.b64encode(pcm_S.astype("<f4").tobytes()).decode()
                kind = "response.output_audio.delta"
                yield self._frame(kind, response_id=self._response(turn), audio=audio, unit=unit)
            case AnswerEnd(unit, turn, interrupted):
                status = "cancelled" if interrupted else "completed"
                yield self._frame("response.done", response={"id": self._response(turn), "status": status}, unit=unit)
            case Listened(unit):
                yield self._frame("response.listen", unit=unit)
            case UnitDone(report):
                yield self._unit(report)
            case StateChanged(state):
                yield self._frame("a2t.state", state=state)
            case Answered(question, text, failure):
                error = None if failure is None else {"code": failure.code, "message": failure.message}
                yield self._frame("a2t.answer", id=question.id, question=question.text, answer=text, error=error)
            case Closed(end):
                yield self._end(end)

    @property
    def usage(self) -> Frame:
        total = self._input_tokens + self._output_tokens
        return {"input_tokens": self._input_tokens, "output_tokens": self._output_tokens, "total_tokens": total}

    def _frame(self, kind: str, **fields: Any) -> Frame:
        self._events += 1
        return {"type": kind, "event_id": f"event_{self._events}", **fields}

    def _response(self, turn: int) -> str:
        return f"{self.session_id}_turn_{turn}"

    def _opened(self, event: Opened) -> Frame:
        self.session_id = event.session_id
        self._input_tokens += event.settings.get("prefix_tokens", 0) + event.used[0]
        self._output_tokens += event.used[1]
        return self._frame(
            "session.created",
            session_id=event.session_id,
            model=self.model,
            config=event.settings,
            resume_token=event.resume_token,
            resumed=event.resumed,
        )

    def _unit(self, report: UnitReport) -> Frame:
        self._input_tokens += report.input_tokens
        self._output_tokens += report.output_tokens
        return self._frame(
            "a2t.unit",
            unit=report.unit,
            decision=report.decision,
            listening=report.listening,
            end_of_turn=report.end_of_turn,
            transcript=report.transcript,
            response=report.response,
            segment_closed_by=report.segment_closed_by,
            residents=report.residents,
            resident_total=report.total,
            peak=report.peak,
            evicted=report.evicted,
            unit_ms=round(report.unit_ms, 3),
            deadline_ms=DEADLINE_MS,
            missed=report.missed,
            forwards=report.forwards,
            positions=report.positions,
            kv_bytes=report.kv_bytes,
            encoder_bytes=report.encoder_bytes,
            usage=self.usage,
        )

    def _end(self, end: SessionEnd) -> Frame:
        """Clients end the session on any error event: it is sent once, last."""
        if end.failure is not None:
            return self._frame("error", error={"code": end.failure.code, "message": end.failure.message})
        return self._frame("session.closed", session_id=self.session_id, reason=end.reason, usage=self.usage)
