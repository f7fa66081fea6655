"""The realtime wire dialect that MiniCPM-o's clients speak (PyPI: openbmb-realtime). No Ray, no sockets.

    server                                     client
    session.queued / session.queue_update ...
    session.queue_done                      -> session.init
    session.created                         -> input.append ... session.close
    response.* / transcription / a2t.unit / usage ... session.closed

`a2t.unit` is this project's own event, once a unit: residents by kind, evictions, unit time against its deadline.
Stock clients skip it, but take the cumulative `usage` that rides on it.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve_apps.messages import SAMPLE_RATE_IN, Failure, SessionEnd, SessionOptions, Ticket, UnitReport

SUBPROTOCOL = "map.realtime"
DEADLINE_MS = 1000.0
MAX_APPEND_S = 60.0
MAX_FRAME_CHARS = int(MAX_APPEND_S * SAMPLE_RATE_IN * 4 * 4 / 3) + 4096
MAX_PROMPT_CHARS = 16_384
LOUDEST = 64.0  # float PCM lives in [-1, 1]; far beyond it are integers sent as floats

Event = dict[str, Any]


class WireError(ValueError):
    """The client broke the dialect. `code` is stable and machine-readable; the message says what to send instead."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class AudioAppend:
    pcm_S: np.ndarray  # 16 kHz mono float32, finite; may be empty
    force_listen: bool


@dataclass(frozen=True)
class SessionClose:
    reason: str


ClientEvent = SessionOptions | AudioAppend | SessionClose


def parse_client_event(frame: str | bytes) -> ClientEvent:
    """One text frame from the client. Raises WireError for everything that is not a well-formed event."""
    if len(frame) > MAX_FRAME_CHARS:
        raise WireError("frame_too_large", f"{len(frame)} characters; send at most {MAX_APPEND_S:.0f} s in a frame")
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
        return _parse_init(event)
    if kind == "session.close":
        reason = event.get("reason")
        return SessionClose(_text(reason, "reason", 256) if isinstance(reason, str) and reason else "user_stop")
    raise WireError("unknown_event_type", f"{kind[:64]!r}: send session.init, input.append or session.close")


def _parse_append(event: Event) -> AudioAppend:
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
    if (seconds := len(pcm_S) / SAMPLE_RATE_IN) > MAX_APPEND_S:
        raise WireError("frame_too_large", f"{seconds:.0f} s of audio; send at most {MAX_APPEND_S:.0f} s in a frame")
    if len(pcm_S) and not (np.abs(pcm_S) <= LOUDEST).all():  # also false for NaN
        raise WireError("invalid_audio", "samples must be finite floats in [-1, 1]: 16 kHz mono float32 PCM")
    return AudioAppend(pcm_S, force)


def _parse_init(event: Event) -> SessionOptions:
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


def _object(value: object, name: str) -> Event:
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


def _number(config: Event, name: str, low: float, high: float) -> float | None:
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise WireError("invalid_config", f"{name} must be a number from {low:g} to {high:g}")
    return float(value)


def _whole(config: Event, name: str, low: int, high: int) -> int | None:
    value = _number(config, name, low, high)
    if value is None:
        return None
    if not math.isclose(value, round(value)):
        raise WireError("invalid_config", f"{name} must be a whole number, not {value:g}")
    return round(value)


class Dialect:
    """Emits the server's side of one conversation: event ids, turn numbers and cumulative usage live here."""

    def __init__(self, session_id: str, model: str):
        self.session_id = session_id
        self.model = model
        self._events = 0
        self._queued_before = False
        self._turn = 0
        self._turn_open = False
        self._input_tokens = 0
        self._output_tokens = 0

    def _event(self, kind: str, **fields: Any) -> Event:
        self._events += 1
        return {"type": kind, "event_id": f"event_{self._events}", **fields}

    @property
    def usage(self) -> Event:
        total = self._input_tokens + self._output_tokens
        return {"input_tokens": self._input_tokens, "output_tokens": self._output_tokens, "total_tokens": total}

    @property
    def _response_id(self) -> str:
        return f"{self.session_id}_turn_{self._turn}"

    def queued(self, ticket: Ticket) -> Event:
        kind = "session.queue_update" if self._queued_before else "session.queued"
        self._queued_before = True
        return self._event(
            kind,
            position=ticket.position,
            queue_length=ticket.queue_length,
            estimated_wait_s=ticket.estimated_wait_s,
        )

    def queue_done(self) -> Event:
        return self._event("session.queue_done")

    def created(self, config: Event) -> Event:
        """`config`: the settings in force, budget under `max_kv_tokens`."""
        self._input_tokens += config.get("prefix_tokens", 0)
        return self._event("session.created", session_id=self.session_id, model=self.model, config=config)

    def unit(self, report: UnitReport) -> Iterator[Event]:
        """Everything a client is told of one unit, `a2t.unit` last: when it arrives the unit is complete."""
        if report.transcript:
            yield self._event(
                "conversation.item.input_audio_transcription.completed",
                transcript=report.transcript,
                unit=report.unit,
            )
        if report.response:
            self._turn_open = True
        cut = report.listening and self._turn_open  # forced to listen in the middle of its turn
        ends = (report.end_of_turn or cut) and self._turn_open
        if report.response or ends:
            yield self._event(
                "response.output_text.delta",
                response_id=self._response_id,
                text=report.response,
                end_of_turn=ends,
                unit=report.unit,
            )
        if report.speech_S is not None and len(report.speech_S):
            audio = base64.b64encode(report.speech_S.astype("<f4").tobytes()).decode()
            yield self._event(
                "response.output_audio.delta", response_id=self._response_id, audio=audio, unit=report.unit
            )
        self._input_tokens += report.input_tokens
        self._output_tokens += report.output_tokens
        if ends:
            status = "cancelled" if cut else "completed"
            yield self._event("response.done", response={"id": self._response_id, "status": status})
            self._turn += 1
            self._turn_open = False
        if report.listening:
            yield self._event("response.listen", unit=report.unit)
        yield self._event(
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

    def end(self, end: SessionEnd) -> Event:
        if end.failure is not None:
            return self.error(end.failure)
        return self._event("session.closed", session_id=self.session_id, reason=end.reason, usage=self.usage)

    def error(self, failure: Failure | WireError) -> Event:
        """Clients end the session on any error event: sent once, last."""
        return self._event("error", error={"code": failure.code, "message": failure.message})


def encode(event: Event) -> str:
    return json.dumps(event, ensure_ascii=False, allow_nan=False)
