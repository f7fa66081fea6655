"""The REST side over real sockets with a real engine: views, questions, ending, and who may not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from openbmb_realtime import ErrorEvent, RealtimeConfig, RealtimeError, SessionClosed, UsageEvent

from a2t.duplex.conversation import ConversationConfig
from a2t.duplex.engine import Engine, EngineConfig
from jobs.demo.call import hold
from serve_apps.access import Access
from serve_apps.limits import MAX_BODY_BYTES
from serve_apps.messages import SessionOptions
from serve_apps.models import HostConfig, conversation_config
from tests.serve.endpoint import MODEL, Endpoint, endpoint
from tests.serve.local import small_model

QUESTION, PROMPT = "w3 w5 w7", "w1 w2 w3"


@pytest.fixture
async def at() -> AsyncIterator[Endpoint]:
    async with endpoint() as at:
        yield at


def settings(**options: Any) -> ConversationConfig:
    return conversation_config(small_model(), HostConfig(), SessionOptions(**options))


def noise(seconds: int) -> np.ndarray:
    return (0.1 * np.random.default_rng(1).standard_normal(seconds * 16_000)).astype(np.float32)


async def ask(at: Endpoint, session: str, question: str = QUESTION) -> Any:
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(f"{at.address}/v1/sessions/{session}/query", json={"question": question})


async def heard(session: Any, units: int) -> None:
    async with asyncio.timeout(60):
        async for event in session:
            assert not isinstance(event, ErrorEvent)
            units -= isinstance(event, UsageEvent)
            if not units:
                return


async def test_a_question_is_answered_from_the_transcript_and_the_conversation_does_not_notice(at: Endpoint) -> None:
    audio = noise(12)
    reference = Engine(small_model(), rows=1, capacity=1024, config=EngineConfig(side_channel_budget_s=None))
    conversation = reference.open(settings(budget=60, system_prompt=PROMPT))
    reference.push(conversation, audio[: 6 * 16_000])
    reference.run()
    expected = reference.ask(conversation, QUESTION)

    config = RealtimeConfig(max_kv_tokens=60)
    session = await at.client().audio.connect(model=MODEL, system_prompt=PROMPT, config=config)
    await session.send_audio(audio[: 6 * 16_000].tobytes())
    await heard(session, 6)
    before = (await at.get(f"/v1/sessions/{session.id}")).json()
    answer = await ask(at, session.id)
    assert answer.status_code == 200
    assert answer.json()["answer"] == expected
    assert answer.json()["from_record"] is False
    after = (await at.get(f"/v1/sessions/{session.id}")).json()
    assert (after["memory"], after["transcript"]) == (before["memory"], before["transcript"])
    assert after["state"] in ("live", "paused")
    await session.send_audio(audio[6 * 16_000 :].tobytes())
    await heard(session, 6)
    view = (await at.get(f"/v1/sessions/{session.id}")).json()
    unasked = await hold(at.address, MODEL, audio, budget=60, prompt=PROMPT)
    other = (await at.get(f"/v1/sessions/{unasked.session_id}")).json()
    assert view["transcript"] == other["transcript"]
    assert view["transcript"], "the random model never wrote: choose another seed"
    assert view["memory"]["residents"] == other["memory"]["residents"]
    await session.close()


async def test_after_its_end_a_conversation_is_asked_from_its_record(at: Endpoint) -> None:
    talk = await hold(at.address, MODEL, noise(8), budget=60, prompt=PROMPT)
    await at.empty()
    answer = await ask(at, talk.session_id)
    assert answer.status_code == 200
    assert answer.json()["from_record"] is True
    model = small_model()
    engine = Engine(model, rows=2, capacity=1024, config=EngineConfig(side_channel_budget_s=None))
    conversation = engine.open(settings(budget=60, system_prompt=PROMPT))
    engine.push(conversation, noise(8))
    engine.run()
    assert answer.json()["answer"] == engine.ask(conversation, QUESTION)
    other = engine.open(settings(budget=60))
    engine.push(other, noise(8))
    engine.run()
    assert answer.json()["answer"] != engine.ask(other, QUESTION), "the prompt changes nothing: choose another"
    assert (await at.host.load()).sessions == ()


async def test_deleting(at: Endpoint) -> None:
    async with httpx.AsyncClient(base_url=at.address, timeout=60) as http:
        first = await at.client().audio.connect(model=MODEL)
        second = await at.client().audio.connect(model=MODEL)
        waiting = asyncio.create_task(at.client().audio.connect(model=MODEL))
        async with asyncio.timeout(60):
            while not (line := [s["id"] for s in await at.settled(2) if s["state"] == "queued"]):
                await asyncio.sleep(0.05)
        assert (await http.delete(f"/v1/sessions/{line[0]}")).status_code == 204
        with pytest.raises(RealtimeError) as caught:
            await waiting
        assert caught.value.code == "session_deleted"
        assert (await http.delete(f"/v1/sessions/{first.id}")).status_code == 204
        async with asyncio.timeout(60):
            events = [e async for e in first.events()]
        assert isinstance(events[-1], SessionClosed)
        assert events[-1].reason == "deleted"
        await at.settled(1)
        assert (await http.get(f"/v1/sessions/{first.id}")).json()["end"]["reason"] == "deleted"
        assert (await http.delete(f"/v1/sessions/{first.id}")).status_code == 204
        assert (await http.get(f"/v1/sessions/{first.id}")).status_code == 404
        assert (await http.delete(f"/v1/sessions/{first.id}")).status_code == 404
        await second.send_audio(noise(1).tobytes())
        await heard(second, 1)
        await second.close()
    await at.empty()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_question"),
        (b"{", 400, "invalid_question"),
        (b"[" * 60_000, 400, "invalid_question"),
        (b"[]", 400, "invalid_question"),
        (b'{"question": 3}', 400, "invalid_question"),
        (b'{"question": "  "}', 400, "invalid_question"),
        (b'{"question": "not one of its words"}', 400, "invalid_question"),
        (b'{"question": "' + b"w" * MAX_BODY_BYTES + b'"}', 413, "body_too_large"),
    ],
)
async def test_what_is_no_question_gets_a_typed_error(at: Endpoint, body: bytes, status: int, code: str) -> None:
    session = await at.client().audio.connect(model=MODEL)
    async with httpx.AsyncClient(base_url=at.address, timeout=60) as http:
        answer = await http.post(f"/v1/sessions/{session.id}/query", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.json()["error"]["message"]
    await session.close()


async def test_unknown_sessions_and_too_many_questions() -> None:
    async with endpoint(questions_per_s=0.5) as at:
        assert (await ask(at, "none")).status_code == 404
        answer = await ask(at, "none")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limited")
        assert answer.headers["retry-after"] == "1"
        assert (await at.get("/v1/sessions/none")).status_code == 404


async def test_keys_and_origins() -> None:
    routes = [("GET", "/v1/models"), ("GET", "/v1/sessions"), ("GET", "/v1/sessions/x"), ("DELETE", "/v1/sessions/x")]
    routes.append(("POST", "/v1/sessions/x/query"))
    async with endpoint(access=Access(keys=("secret",))) as at:
        async with httpx.AsyncClient(base_url=at.address, timeout=60) as http:
            for method, path in routes:
                answer = await http.request(method, path, headers={"Authorization": "Bearer wrong"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                right = {"Authorization": "Bearer secret"}
                answer = await http.request(method, path, headers={**right, "Origin": "https://evil.example"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
                answer = await http.request(method, path, headers=right, content=json.dumps({"question": "w1"}))
                assert answer.status_code in (200, 404)
            assert (await http.get("/healthz")).status_code == 200
        with pytest.raises(RealtimeError) as caught:
            await at.client().audio.connect(model=MODEL)
        assert caught.value.code == "invalid_api_key"
