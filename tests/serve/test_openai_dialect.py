"""The OpenAI dialect's events, each against the client's own model of it, in the orders that clients take them."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from serve_apps.events import Admitted, Closed, Command, Enter, Event, Hear, Interrupt, Open, Opened, Read, Reply, Turns
from serve_apps.limits import WireError
from serve_apps.messages import Failure, SessionEnd
from serve_apps.openai_events import PATIENCE
from serve_apps.openai_realtime import HANDLERS, MAX_ALONE, OpenAI
from tests.serve.reports import report

schema: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
RATE = 24_000


def b64(pcm_S: np.ndarray) -> str:
    return base64.b64encode((pcm_S * 32767).astype("<i2").tobytes()).decode()


def voice(seconds: float, rate: int = RATE) -> np.ndarray:
    return 0.2 * np.sin(2 * np.pi * 200 * np.arange(int(seconds * rate)) / rate)


class Side:
    """A dialect as a call drives it: `frames` is what the client gets, `commands` what the conversation is asked."""

    def __init__(self, dialect: OpenAI | None = None, valid: bool = True) -> None:
        self.dialect, self.valid = dialect or OpenAI("m"), valid
        self.turns = Turns()
        self.frames: list[dict[str, Any]] = []
        self.commands: list[Command] = []
        self._collect(self.dialect.greet())
        self.tell(Admitted("sess_1", "token"))

    def tell(self, event: Event) -> list[str]:
        return self._collect(self.dialect.tell(event))

    def unit(self, unit: int, **changes: Any) -> list[str]:
        return [kind for event in self.turns.events(report(unit, **changes)) for kind in self.tell(event)]

    def says(self, unit: int, text: str, last: bool = False) -> list[str]:
        return self.unit(unit, listening=False, response=text, end_of_turn=last, speech_S=np.zeros(RATE, np.float32))

    def send(self, kind: str, **fields: Any) -> list[str]:
        return self.raw(json.dumps({"type": kind, **fields}))

    def raw(self, frame: str | bytes) -> list[str]:
        return self._collect(self.dialect.receive(frame))

    def hear(self, pcm_S: np.ndarray) -> list[str]:
        return self.send("input_audio_buffer.append", audio=b64(pcm_S))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [f for f in self.frames if f["type"] == kind]

    def _collect(self, answers: Any) -> list[str]:
        kinds = []
        for answer in answers:
            frame = answer.frame if isinstance(answer, Reply) else answer
            if not isinstance(frame, dict):
                self.commands.append(frame)
                if isinstance(frame, Open):
                    self._collect(self.dialect.tell(Opened("sess_1", {}, "token")))
                continue
            frame = json.loads(json.dumps(frame, allow_nan=False))
            if self.valid:
                assert schema.validate_python(frame).type == frame["type"]
            self.frames.append(frame)
            kinds.append(frame["type"])
        return kinds


DONE = [
    "response.output_audio.done", "response.output_audio_transcript.done", "response.content_part.done",
    "response.output_item.done", "conversation.item.done", "response.done", "rate_limits.updated",
]  # fmt: skip
BEGUN = [
    "response.created", "response.output_item.added", "conversation.item.added", "response.content_part.added",
    "response.output_audio_transcript.delta", "response.output_audio.delta",
]  # fmt: skip
COMMITTED = [
    "input_audio_buffer.speech_stopped", "input_audio_buffer.committed", "conversation.item.added",
    "conversation.item.done",
]  # fmt: skip
STARTED = "input_audio_buffer.speech_started"
DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"


def test_a_question_and_its_answer_in_the_order_that_every_client_takes() -> None:
    side = Side()
    assert [f["type"] for f in side.frames] == ["session.created"]
    assert side.send("session.update", session={"type": "realtime", "instructions": "i am your helper"}) == [
        "session.updated"
    ]
    assert side.hear(np.zeros(RATE // 2)) == []
    assert side.hear(voice(1.0)) == [STARTED]
    assert side.unit(0, transcript="where is") == [DELTA]
    assert side.hear(np.zeros(RATE)) == COMMITTED
    assert side.unit(1, transcript="the key") == [DELTA]
    side.hear(np.zeros(RATE // 2))
    assert side.says(2, "in the") == [*BEGUN, COMPLETED]
    assert side.says(3, " hall", last=True) == [*BEGUN[-2:], *DONE]
    (completed,) = side.of(COMPLETED)
    assert completed["transcript"] == "where is the key"
    assert [d["delta"] for d in side.of(DELTA)] == ["where is", " the key"]
    (started,), (stopped,) = side.of(STARTED), side.of("input_audio_buffer.speech_stopped")
    assert started["item_id"] == stopped["item_id"] == completed["item_id"]
    assert started["audio_start_ms"] == pytest.approx(500, abs=40)
    assert stopped["audio_end_ms"] == pytest.approx(1500, abs=40)
    (done,) = side.of("response.done")
    assert done["response"]["status"] == "completed"
    assert done["response"]["output"][0]["content"][0]["transcript"] == "in the hall"
    assert done["response"]["usage"]["total_tokens"] > 0
    heard = [c.pcm_S for c in side.commands if isinstance(c, Hear)]
    assert sum(map(len, heard)) == pytest.approx(3.0 * 16_000, rel=0.02)
    opened = [c for c in side.commands if isinstance(c, Open)]
    assert [o.options.system_prompt for o in opened] == ["i am your helper"]
    ids = [f["event_id"] for f in side.frames]
    assert len(set(ids)) == len(ids)


def test_the_model_yields_to_a_voice_and_goes_on_through_a_back_channel() -> None:
    side = Side()
    side.hear(np.zeros(RATE))
    side.says(0, "the red key")
    assert side.hear(np.concatenate([voice(0.3), np.zeros(RATE)])) == []  # hm-hm: nothing to stop playback for
    assert side.unit(1, listening=False, response=" is in", transcript="yes") == [BEGUN[-2]]
    assert side.hear(voice(1.0)) == []
    yielded = side.unit(2, listening=False, end_of_turn=True, transcript="no wait", decision="<|turn_eos|>")
    assert yielded == [STARTED, DELTA, DELTA, *DONE]
    (done,) = side.of("response.done")
    assert done["response"]["status"] == "cancelled"
    assert done["response"]["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
    assert done["response"]["output"][0]["status"] == "incomplete"
    assert side.hear(np.zeros(RATE)) == COMMITTED
    side.unit(3)
    side.unit(4)
    assert [c["transcript"] for c in side.of(COMPLETED)] == ["yes no wait"]


def test_a_back_channel_becomes_an_item_once_the_answer_is_complete() -> None:
    side = Side()
    side.hear(np.zeros(RATE))
    side.says(0, "the red")
    side.hear(np.concatenate([voice(0.3), np.zeros(RATE)]))
    side.unit(1, listening=False, response=" key is", transcript="yes")
    kinds = side.says(2, " here", last=True)
    assert kinds == [*BEGUN[-2:], *DONE, "conversation.item.added", "conversation.item.done", COMPLETED]
    assert side.of("response.done")[0]["response"]["status"] == "completed"
    assert side.of(COMPLETED)[0]["transcript"] == "yes"


def test_cancelled_answers_are_fenced_off() -> None:
    side = Side()
    assert side.send("response.cancel") == ["error"]
    assert side.of("error")[0]["error"]["code"] == "response_cancel_not_active"
    assert side.of("error")[0]["error"]["message"].startswith("Cancellation failed")
    side.hear(np.zeros(RATE))
    side.says(0, "the red key")
    assert side.send("response.cancel") == DONE
    assert isinstance(side.commands[-1], Interrupt)
    assert side.says(1, " is in") == []  # under way when it was cancelled
    assert side.unit(2) == []
    assert side.of("response.done")[0]["response"]["status_details"]["reason"] == "client_cancelled"
    side.says(3, "again")
    assert len({r["response"]["id"] for r in side.of("response.created")}) == 2


def test_a_response_asked_for() -> None:
    side = Side()
    item = {"type": "message", "role": "user", "id": "mine", "content": [{"type": "input_text", "text": "where is it"}]}
    assert side.send("conversation.item.create", item=item) == ["conversation.item.added", "conversation.item.done"]
    assert Read("where is it") in side.commands
    assert side.send("response.create", response={"metadata": {"client_event_id": "x"}}) == ["response.created"]
    assert side.of("response.created")[0]["response"]["metadata"] == {"client_event_id": "x"}
    assert side.send("response.create") == ["error"]
    assert side.of("error")[0]["error"]["code"] == "conversation_already_has_active_response"
    before = sum(isinstance(c, Hear) for c in side.commands)
    assert side.unit(0) == []  # and as the client sends no audio, it hears silence until the answer is complete
    assert side.says(1, "here", last=True) == [*BEGUN[1:], *DONE]
    assert sum(isinstance(c, Hear) for c in side.commands) == before + 1
    assert len({r["response"]["id"] for r in [*side.of("response.created"), *side.of("response.done")]}) == 1


def test_a_response_that_the_model_declines() -> None:
    side = Side()
    side.send("response.create")
    kinds = [kind for unit in range(PATIENCE) for kind in side.unit(unit)]
    assert kinds == ["response.done", "rate_limits.updated"]
    response = side.of("response.done")[0]["response"]
    assert (response["status"], response["output"]) == ("completed", [])


def test_an_answer_that_nobody_could_interrupt_is_cut_at_last() -> None:
    side = Side()
    side.send("response.create")
    for unit in range(MAX_ALONE):
        side.says(unit, "on")
    (done,) = side.of("response.done")
    assert done["response"]["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
    assert isinstance(side.commands[-1], Interrupt)
    assert side.says(MAX_ALONE, "and on") == []


def test_items_are_the_client_s_to_address() -> None:
    side = Side()
    assert side.send("conversation.item.retrieve", item_id="none") == ["error"]
    assert side.of("error")[0]["error"]["code"] == "item_retrieve_invalid_item_id"
    side.says(0, "one two three four", last=True)
    id = side.of("response.output_item.done")[0]["item"]["id"]
    assert side.send("conversation.item.truncate", item_id=id, content_index=0, audio_end_ms=500) == [
        "conversation.item.truncated"
    ]
    side.send("conversation.item.retrieve", item_id=id)
    assert side.of("conversation.item.retrieved")[0]["item"]["content"][0]["transcript"] == "one two"
    assert side.send("conversation.item.delete", item_id=id) == ["conversation.item.deleted"]
    assert side.send("conversation.item.retrieve", item_id=id) == ["error"]
    assert side.send("conversation.item.truncate", item_id="none", audio_end_ms=-3) == ["conversation.item.truncated"]


def test_who_turns_detection_off_is_told_nothing_of_voices() -> None:
    side = Side()
    side.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
    assert side.of("session.updated")[0]["session"]["audio"]["input"]["turn_detection"] is None
    assert side.hear(np.concatenate([voice(1.0), np.zeros(RATE)])) == []
    assert side.unit(0, transcript="one") == [DELTA]
    assert side.send("input_audio_buffer.commit") == COMMITTED[1:]
    assert side.send("input_audio_buffer.clear") == ["input_audio_buffer.cleared"]
    assert side.unit(1) == []
    assert side.unit(2) == [COMPLETED]


def test_text_is_answered_in_text_alone() -> None:
    side = Side()
    side.send("session.update", session={"type": "realtime", "output_modalities": ["text"]})
    side.says(0, "in the hall", last=True)
    assert [d["delta"] for d in side.of("response.output_text.delta")] == ["in the hall"]
    assert side.of("response.output_text.done")[0]["text"] == "in the hall"
    assert not side.of("response.output_audio.delta")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"format": {"type": "audio/pcm", "rate": 16000}}, {"format": {"type": "audio/pcm", "rate": 24000}}),
        ({"format": {"type": "audio/pcmu"}}, {"format": {"type": "audio/pcmu"}}),
        ({"turn_detection": {"type": "server_vad", "threshold": 0.6}}, {"turn_detection": {"threshold": 0.6}}),
        ({"turn_detection": {"type": "semantic_vad"}}, {"turn_detection": {"interrupt_response": True}}),
        ({"turn_detection": "loud"}, {"turn_detection": {"type": "semantic_vad"}}),
    ],
)
def test_settings_are_shown_as_clients_need_them(given: Any, shown: Any) -> None:
    side = Side()
    side.send("session.update", session={"type": "realtime", "audio": {"input": given}})
    settled = side.of("session.updated")[0]["session"]["audio"]["input"]
    for name, value in shown.items():
        assert {k: settled[name][k] for k in value} == value


def test_settings_that_change_later_are_read_to_the_model() -> None:
    side = Side()
    side.hear(np.zeros(RATE))
    side.send("session.update", session={"type": "realtime", "instructions": "now be brief"})
    side.send("session.update", session={"type": "realtime", "audio": {"output": {"voice": "ash"}}})
    assert [c for c in side.commands if isinstance(c, Read)] == [Read("now be brief")]
    assert side.of("session.updated")[-1]["session"]["audio"]["output"]["voice"] == "ash"


def test_failures_and_the_budget() -> None:
    side = Side(OpenAI("m", {"max_kv_tokens": "500", "model": "gpt-realtime"}))
    (enter,) = side.commands
    assert isinstance(enter, Enter)
    assert enter.options is not None
    assert enter.options.budget == 500
    assert side.frames[0]["session"]["model"] == "gpt-realtime"
    assert side.tell(Closed(SessionEnd("x", Failure("cache_full", "no room")))) == ["error"]
    for wrong in ("", "-1", "1.5", "9" * 20):
        with pytest.raises(WireError):
            OpenAI("m", {"max_kv_tokens": wrong})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    "session audio item item_id response content type input output format instructions role".split()
)
fields = st.dictionaries(names, st.dictionaries(names, json_values, max_size=3) | json_values, max_size=3)
near_events = st.builds(lambda kind, rest: {**rest, "type": kind}, st.sampled_from(sorted(HANDLERS)), fields)


@settings(max_examples=40)
@given(
    st.lists(st.binary(max_size=60) | st.text(max_size=60) | (json_values | near_events).map(json.dumps), max_size=4)
)
def test_a_client_survives_whatever_it_sends(frames: list[str | bytes]) -> None:
    side = Side(valid=False)  # it is shown its own settings again, however odd
    for frame in frames:
        side.raw(frame)
    side.says(0, "one", last=True)
    assert side.of("response.done")
