"""The wire dialect against the stock client's own builder and parser (openbmb-realtime), and against garbage."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openbmb_realtime.protocol import build_input_append, build_session_close, build_session_init, parse_server_event
from openbmb_realtime.types import RealtimeConfig, RealtimeConnectOptions

from serve_apps.events import Admitted, Close, Closed, Command, Enter, Event, Hear, Open, Opened, Queued, Resume, Turns
from serve_apps.limits import MAX_FRAME_CHARS, WireError
from serve_apps.messages import Failure, SessionEnd, SessionOptions, Ticket, UnitReport
from serve_apps.realtime import Realtime, parse_client_event
from tests.serve.reports import report


def b64(pcm: np.ndarray) -> str:
    return base64.b64encode(pcm.tobytes()).decode()


def append(audio: Any, **fields: Any) -> str:
    return json.dumps({"type": "input.append", "input": {"audio": audio, **fields}})


def init(**config: Any) -> str:
    return json.dumps({"type": "session.init", "payload": {"config": config}})


class Side:
    """A dialect told unit after unit, as a call tells it."""

    def __init__(self) -> None:
        self.dialect, self.turns = Realtime("m"), Turns()
        self.tell(Opened("sess_1", {}, "token"))

    def tell(self, event: Event) -> list[dict[str, Any]]:
        return list(self.dialect.tell(event))

    def unit(self, report: UnitReport) -> list[dict[str, Any]]:
        return [frame for event in self.turns.events(report) for frame in self.tell(event)]

    def seen(self, report: UnitReport) -> list[Any]:
        """What the stock client makes of a unit's frames."""
        return [read(frame) for frame in self.unit(report)]


def read(frame: dict[str, Any]) -> Any:
    return parse_server_event(json.dumps(frame, allow_nan=False))


def test_stock_session_init() -> None:
    config = RealtimeConfig(length_penalty=1.2, max_tokens=12, temperature=0.5, max_kv_tokens=1000, tts_enabled=False)
    options = RealtimeConnectOptions("m", "i am your helper", config, reference_audio_base64="AAAA")
    parsed = parse_client_event(build_session_init(options))
    assert parsed == Open(SessionOptions("i am your helper", 1000, 0.5, 1.2, 12, speech=False))
    assert parse_client_event(build_session_init(RealtimeConnectOptions("m"))) == Open()


def test_stock_audio_and_close(second: np.ndarray) -> None:
    parsed = parse_client_event(build_input_append(b64(second), force_listen=True))
    assert isinstance(parsed, Hear)
    assert parsed.force_listen
    np.testing.assert_array_equal(parsed.pcm_S, second)
    assert parse_client_event(build_session_close("bye")) == Close("bye")
    assert parse_client_event(json.dumps({"type": "session.close"})) == Close("user_stop")
    empty = parse_client_event(build_input_append(""))
    assert isinstance(empty, Hear)
    assert len(empty.pcm_S) == 0


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("", "invalid_json"),
        ("{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ("9" * 10_000, "invalid_json"),
        ("[]", "invalid_event"),
        ("null", "invalid_event"),
        ('"text"', "invalid_event"),
        ("{}", "invalid_event"),
        ('{"type": 3}', "invalid_event"),
        ('{"type": "response.create"}', "unknown_event_type"),
        ('{"type": "input.append"}', "invalid_event"),
        ('{"type": "input.append", "input": []}', "invalid_event"),
        (append(3), "invalid_audio"),
        (append(None), "invalid_audio"),
        (append("not base64!"), "invalid_audio"),
        (append("AAA"), "invalid_audio"),
        (append("AAAA"), "invalid_audio"),  # three bytes
        (append("ééé"), "invalid_audio"),
        (append(b64(np.array([np.nan], np.float32))), "invalid_audio"),
        (append(b64(np.array([0.1, -np.inf], np.float32))), "invalid_audio"),
        (append(b64(np.array([12000], np.float32))), "invalid_audio"),
        (append("", force_listen="yes"), "invalid_event"),
        (append("", video_frames=["AAAA"]), "unsupported_input"),
        (append(b64(np.zeros(61 * 16_000, np.float32))), "frame_too_large"),
        ("x" * (MAX_FRAME_CHARS + 1), "frame_too_large"),
        ('{"type": "session.init", "payload": 1}', "invalid_event"),
        ('{"type": "session.init", "payload": {"config": "x"}}', "invalid_event"),
        ('{"type": "session.init", "payload": {"system_prompt": 7}}', "invalid_config"),
        ('{"type": "session.init", "payload": {"system_prompt": "\\ud800"}}', "invalid_config"),
        (json.dumps({"type": "session.init", "payload": {"system_prompt": "w " * 20_000}}), "invalid_config"),
        (init(max_kv_tokens=-1), "invalid_config"),
        (init(max_kv_tokens=True), "invalid_config"),
        (init(max_kv_tokens=4000.5), "invalid_config"),
        (init(max_kv_tokens=float("inf")), "invalid_config"),
        (init(temperature=float("nan")), "invalid_config"),
        (init(temperature="hot"), "invalid_config"),
        (init(length_penalty=0), "invalid_config"),
        (init(max_tokens=0), "invalid_config"),
        (init(tts_enabled=1), "invalid_config"),
    ],
)
def test_garbage_gets_a_typed_error(frame: str | bytes, code: str) -> None:
    with pytest.raises(WireError) as caught:
        parse_client_event(frame)
    assert caught.value.code == code
    assert caught.value.message
    (end,) = Side().tell(Closed(SessionEnd(code, Failure(code, caught.value.message))))
    shown = read(end)
    assert (shown.kind, shown.code, shown.message) == ("error", code, caught.value.message)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
fields = st.sampled_from(
    "type input audio force_listen payload config system_prompt reason max_kv_tokens temperature max_tokens".split()
)
near_events = st.fixed_dictionaries(
    {"type": st.sampled_from(["input.append", "session.init", "session.close"])},
    optional={
        "input": st.dictionaries(fields, json_values, max_size=4) | json_values,
        "payload": st.dictionaries(fields, st.dictionaries(fields, json_values, max_size=3) | json_values, max_size=4),
        "reason": json_values,
    },
)


@settings(max_examples=400)
@given(st.binary(max_size=200) | st.text(max_size=200) | (json_values | near_events).map(json.dumps))
def test_any_frame_is_an_event_or_a_typed_error(frame: str | bytes) -> None:
    with suppress(WireError):
        assert isinstance(parse_client_event(frame), Command)


def test_queue_and_creation_as_the_stock_client_reads_them() -> None:
    d = Realtime("m")
    assert list(d.greet()) == [Enter()]
    (first,) = d.tell(Queued(Ticket(position=2, queue_length=3, estimated_wait_s=4.5)))
    (second,) = d.tell(Queued(Ticket(position=1)))
    assert [first["type"], second["type"]] == ["session.queued", "session.queue_update"]
    place = read(first)
    assert (place.kind, place.position, place.queue_length, place.estimated_wait_seconds) == ("queued", 2, 3, 4.5)
    assert [read(f).kind for f in d.tell(Admitted())] == ["queue_done"]
    (frame,) = d.tell(Opened("sess_1", {"max_kv_tokens": 4000, "prefix_tokens": 4}, "secret"))
    created = read(frame)
    assert (created.kind, created.session_id) == ("created", "sess_1")
    assert (frame["resume_token"], frame["resumed"]) == ("secret", False)
    assert d.usage == {"input_tokens": 4, "output_tokens": 0, "total_tokens": 4}
    (closed,) = map(read, d.tell(Closed(SessionEnd("bye"))))
    assert (closed.kind, closed.reason) == ("closed", "bye")
    (failed,) = map(read, d.tell(Closed(SessionEnd("x", Failure("cache_full", "no room")))))
    assert (failed.kind, failed.code) == ("error", "cache_full")


def test_a_lost_socket_s_conversation_is_asked_for_in_the_address() -> None:
    d = Realtime("m", {"session": "sess_9", "token": "secret", "after": "41"})
    assert list(d.greet()) == [Resume("sess_9", "secret", 41)]
    for after in ("x", "1.5", "", "--1", "9" * 40):
        with pytest.raises(WireError) as caught:
            Realtime("m", {"session": "sess_9", "after": after}).greet()
        assert caught.value.code == "invalid_event"


def test_a_turn_as_the_stock_client_reads_it() -> None:
    side = Side()
    heard = side.seen(report(0, transcript="where is the key"))
    assert [(e.kind, e.text) for e in heard] == [("listen", "where is the key"), ("listen", None), ("usage", None)]
    speech = np.linspace(-0.5, 0.5, 240, dtype=np.float32)
    said = side.seen(report(1, listening=False, decision="<|speak|>", response="in the", speech_S=speech))
    assert [e.kind for e in said] == ["text", "audio", "usage"]
    assert (said[0].text, said[0].end_of_turn) == ("in the", False)
    np.testing.assert_array_equal(np.frombuffer(said[1].audio or b"", np.float32), speech)
    done = side.seen(report(2, listening=False, decision="hall", response=" hall", end_of_turn=True))
    assert [(e.kind, e.text, e.end_of_turn) for e in done] == [
        ("text", " hall", True),
        ("turn_completed", None, False),
        ("usage", None, False),
    ]
    assert done[-1].usage is not None
    assert done[-1].usage_cumulative
    assert done[-1].usage.prompt_tokens == 30
    assert done[-1].usage.completion_tokens == 3


def test_interruptions_close_the_turn_once() -> None:
    side = Side()
    side.unit(report(0, listening=False, response="in the"))
    forced = side.unit(report(1))  # force_listen: a listening unit in an open turn
    assert [e["type"] for e in forced] == [
        "response.output_text.delta", "response.done", "response.listen", "a2t.unit",
    ]  # fmt: skip
    assert forced[0]["end_of_turn"] is True
    assert forced[1]["response"]["status"] == "cancelled"
    assert [e["type"] for e in side.unit(report(2))] == ["response.listen", "a2t.unit"]
    side.unit(report(3, listening=False, response="one"))
    own = side.unit(report(4, listening=False, decision="<|turn_eos|>", end_of_turn=True))  # the model yields
    assert [e["type"] for e in own] == ["response.output_text.delta", "response.done", "a2t.unit"]
    assert own[1]["response"]["status"] == "completed"
    assert own[1]["response"]["id"] != forced[1]["response"]["id"]


def test_unit_event_carries_the_memory_and_the_clock() -> None:
    unit = report(7, residents={"prefix": 4, "audio": 100}, evicted=26, unit_ms=1200.0, missed=True)
    event = Side().unit(unit)[-1]
    assert event["type"] == "a2t.unit"
    expected = {"unit": 7, "resident_total": 104, "evicted": 26, "unit_ms": 1200.0, "deadline_ms": 1000.0}
    assert event["missed"] is True
    assert {k: event[k] for k in expected} == expected
    assert event["residents"] == {"prefix": 4, "audio": 100}


def test_event_ids_never_repeat() -> None:
    side = Side()
    ids = [e["event_id"] for u in range(5) for e in side.unit(report(u, transcript="w"))]
    assert len(set(ids)) == len(ids) == 15
