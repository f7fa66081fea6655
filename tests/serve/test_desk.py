"""Real sockets, the real openbmb-realtime client and a real engine in this process: all of the endpoint but Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from openbmb_realtime import (
    ErrorEvent,
    RealtimeConfig,
    RealtimeError,
    SessionClosed,
    SessionQueued,
    TurnCompleted,
    UsageEvent,
    WorkerAssigned,
)
from ray.exceptions import RayActorError
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from a2t.duplex.engine import Engine, EngineConfig
from jobs.demo.call import hold
from serve_apps.departure import GOING_AWAY
from serve_apps.messages import SessionOptions
from serve_apps.models import HostConfig, conversation_config
from serve_apps.placement import Placement
from tests.serve.endpoint import MODEL, Endpoint, endpoint
from tests.serve.local import small_model


@pytest.fixture
async def at() -> AsyncIterator[Endpoint]:
    async with endpoint() as at:
        yield at


def noise(seconds: int) -> np.ndarray:
    return (0.1 * np.random.default_rng(1).standard_normal(seconds * 16_000)).astype(np.float32)


async def test_a_conversation_by_the_stock_client(at: Endpoint) -> None:
    audio = noise(12)
    talk = await hold(at.address, MODEL, audio, budget=60, prompt="w1 w2 w3")
    assert [u["unit"] for u in talk.units] == list(range(12))
    assert sum(u["evicted"] for u in talk.units) > 0
    assert all(u["residents"]["prefix"] == 3 for u in talk.units)
    spoke = {u["unit"] for u in talk.units if u["response"]}
    assert spoke, "the random model never spoke: choose another seed"
    assert spoke <= set(talk.speech)

    sessions = await at.settled(0)
    assert talk.session_id in [s["id"] for s in sessions]
    assert all("transcript" not in s for s in sessions)
    view = (await at.get(f"/v1/sessions/{talk.session_id}")).json()
    assert (view["state"], view["units"], view["end"]["reason"]) == ("closed", 12, "user_stop")
    assert view["memory"]["residents"] == talk.units[-1]["residents"]
    written = [
        {k: u[k] for k in ("unit", "transcript", "response")} for u in talk.units if u["transcript"] or u["response"]
    ]
    assert view["transcript"] == written

    engine = Engine(small_model(), rows=1, capacity=1024, config=EngineConfig(side_channel_budget_s=None))
    options = SessionOptions(budget=60, system_prompt="w1 w2 w3")
    conversation = engine.open(conversation_config(small_model(), HostConfig(), options))
    engine.push(conversation, audio)
    for (_, result, stats), unit in zip(engine.run(), talk.units, strict=True):
        assert unit["transcript"] == result.transcript_text.strip()
        assert unit["listening"] == result.listening
        assert unit["resident_total"] == stats.total_residents


async def test_interrupting_pausing_and_closing(at: Endpoint) -> None:
    session = await at.client().audio.connect(model=MODEL)
    second = noise(1).tobytes()
    for _ in range(3):
        session.interrupt()  # the next input carries force_listen
        await session.send_audio(second)
    session.pause()
    await session.send_audio(second)  # not sent: the client is paused
    session.resume()
    seen: list[Any] = []
    async with asyncio.timeout(30):
        async for event in session:
            seen.append(event)
            if sum(isinstance(e, UsageEvent) for e in seen) == 3:
                break
    assert sum(isinstance(e, TurnCompleted) for e in seen) >= 3  # one with each listening unit
    await session.close("enough")
    view = (await at.get(f"/v1/sessions/{session.id}")).json()
    assert (view["units"], view["end"]["reason"]) == (3, "enough")
    assert session.usage is not None
    assert session.usage.prompt_tokens == 2 + 3 * 10  # the default prompt and ten embeddings a unit


async def test_who_finds_no_row_waits_in_line(at: Endpoint) -> None:
    first, second = await asyncio.gather(*(at.client().audio.connect(model=MODEL) for _ in range(2)))
    third = asyncio.create_task(at.client().audio.connect(model=MODEL))
    fourth = asyncio.create_task(at.client().audio.connect(model=MODEL))
    async with asyncio.timeout(30):
        while len(waiting := [s for s in (await at.settled(2)) if s["state"] == "queued"]) < 2:
            await asyncio.sleep(0.1)
    assert not third.done()
    assert not fourth.done()
    await first.close()
    await second.close()
    admitted = [await third, await fourth]
    for session in admitted:
        await session.close()
        events = [e async for e in session.events()]
        kinds = [type(e) for e in events]
        assert kinds[0] is SessionQueued
        assert kinds.index(WorkerAssigned) > 0
        assert kinds[-1] is SessionClosed
    assert {s.id for s in admitted} == {w["id"] for w in waiting}


async def test_who_waits_does_not_notice_that_placement_starts_again(at: Endpoint) -> None:
    held = await asyncio.gather(*(at.client().audio.connect(model=MODEL) for _ in range(2)))
    waiting = asyncio.create_task(at.client().audio.connect(model=MODEL))
    async with asyncio.timeout(30):
        while not at.placement.waiting:
            await asyncio.sleep(0.05)
    at.desk.placement.broken = RayActorError()
    await asyncio.sleep(0.3)
    at.desk.placement.actor, at.desk.placement.broken = Placement(at.placement._fleet), None
    await held[0].close()
    await (await waiting).close()
    await held[1].close()
    async with asyncio.timeout(30):
        while (await at.host.load()).sessions:
            await asyncio.sleep(0.05)


async def test_an_endpoint_that_goes_ends_conversations_and_the_line(at: Endpoint) -> None:
    held = await asyncio.gather(*(at.client().audio.connect(model=MODEL) for _ in range(2)))
    waiting = asyncio.create_task(at.client().audio.connect(model=MODEL))
    async with asyncio.timeout(30):
        while not at.placement.waiting:
            await asyncio.sleep(0.05)
    await at.desk.close(GOING_AWAY)
    with pytest.raises(RealtimeError) as caught:
        await waiting
    assert caught.value.code == GOING_AWAY.code
    for session in held:
        errors = [e for e in [e async for e in session.events()] if isinstance(e, ErrorEvent)]
        assert [e.code for e in errors] == [GOING_AWAY.code]
    await at.empty()


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (["{"], "invalid_json"),
        (['{"type": "input.append", "input": {"audio": ""}}'], "session_not_initialized"),
        (['{"type": "session.init"}', '{"type": "session.init"}'], "already_initialized"),
        (['{"type": "session.init"}', '{"type": "input.append", "input": {"audio": "AAAA"}}'], "invalid_audio"),
        (['{"type": "session.init", "payload": {"system_prompt": "no such words"}}'], "invalid_config"),
    ],
)
async def test_garbage_ends_that_session_alone_with_a_typed_error(at: Endpoint, frames: list[str], code: str) -> None:
    other = await at.client().audio.connect(model=MODEL)
    async with asyncio.timeout(30), connect(at.socket, subprotocols=["map.realtime"]) as socket:  # type: ignore[list-item]
        assert socket.subprotocol == "map.realtime"
        for frame in frames:
            await socket.send(frame)
        events: list[dict[str, Any]] = []
        with suppress(ConnectionClosedError):  # by the server, after its error event
            while True:
                events.append(json.loads(await socket.recv()))
        assert socket.close_code == 1008
    assert (events[-1]["type"], events[-1]["error"]["code"]) == ("error", code)
    await at.settled(1)  # its row is free again, the other one goes on
    await other.send_audio(noise(1).tobytes())
    async with asyncio.timeout(30):
        async for event in other:
            assert not isinstance(event, ErrorEvent)
            if isinstance(event, UsageEvent):
                break
    await other.close()


async def test_refusals_before_a_session(at: Endpoint) -> None:
    with pytest.raises(RealtimeError) as caught:
        await at.client().audio.connect(model="another")
    assert caught.value.code == "model_not_found"
    with pytest.raises(RealtimeError) as caught:
        await at.client().video.connect(model=MODEL)
    assert caught.value.code == "unsupported_mode"
    missing = await at.get("/v1/sessions/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")


async def test_a_client_that_vanishes_leaves_nothing(at: Endpoint) -> None:
    session = await at.client().audio.connect(model=MODEL, config=RealtimeConfig(tts_enabled=False))
    await session.send_audio(noise(1).tobytes())
    transport = session._socket.transport  # type: ignore[attr-defined]
    transport.abort()  # no close frame, no goodbye
    sessions = await at.settled(0)
    (mine,) = [s for s in sessions if s["id"] == session.id]
    assert mine["end"]["reason"] == "client_gone"
    health = (await at.get("/healthz")).json()
    assert health["status"] == "ok"
    assert [e["free"] for e in health["engines"]] == [2]


async def test_rest_views(at: Endpoint) -> None:
    models = (await at.get("/v1/models")).json()
    assert [m["id"] for m in models["data"]] == [MODEL]
