"""The OpenAI dialect over real sockets, by the unmodified openai client, on a small random model."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from serve_apps.access import Access
from tests.serve.endpoint import Endpoint, endpoint

schema: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
RATE = 24_000


@pytest.fixture
async def at() -> AsyncIterator[Endpoint]:
    async with endpoint(rows=1) as at:
        yield at


def client(at: Endpoint, key: str = "unused") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{at.address}/v1", api_key=key)


def noise(seconds: float) -> str:
    pcm_S = 0.1 * np.random.default_rng(1).standard_normal(int(seconds * RATE))
    return base64.b64encode((np.clip(pcm_S, -1, 1) * 32767).astype("<i2").tobytes()).decode()


async def until(connection: Any, *ends: str, known: bool = True) -> list[dict[str, Any]]:
    """Events up to the first of these kinds. `known`: each is one that the client has a model of."""
    seen: list[dict[str, Any]] = []
    async with asyncio.timeout(120):
        while not seen or seen[-1]["type"] not in ends:
            seen.append((await connection.recv()).to_dict())
            assert "error" in ends or seen[-1]["type"] != "error", seen[-1]
            if known:
                schema.validate_python(seen[-1])
    return seen


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [e["type"] for e in events]


async def speaks(connection: Any) -> list[dict[str, Any]]:
    """Noise, second by second, until the model says something."""
    seen: list[dict[str, Any]] = []
    for _ in range(20):
        await connection.input_audio_buffer.append(audio=noise(1))
        try:
            async with asyncio.timeout(0.5):
                while not seen or seen[-1]["type"] != "response.output_audio_transcript.delta":
                    seen.append((await connection.recv()).to_dict())
            return seen
        except TimeoutError:
            continue
    raise AssertionError("the random model never spoke: choose another seed")


async def test_a_conversation_with_text_and_a_cancel(at: Endpoint) -> None:
    async with client(at).realtime.connect(model="gpt-realtime", extra_query={"max_kv_tokens": "60"}) as connection:
        (created,) = await until(connection, "session.created")
        assert created["session"]["model"] == "gpt-realtime"
        await connection.session.update(session={"type": "realtime", "instructions": "no such words here"})
        assert kinds(await until(connection, "session.updated")) == ["session.updated"]
        content = [{"type": "input_text", "text": "hello there"}]
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})  # type: ignore[arg-type, typeddict-item]
        await connection.response.create()
        seen = await until(connection, "response.done")
        assert {"conversation.item.added", "conversation.item.done", "response.created"} <= set(kinds(seen))
        await connection.input_audio_buffer.append(audio=noise(1))
        await connection.response.create()
        created = (await until(connection, "response.created"))[-1]
        await connection.response.cancel()
        done = (await until(connection, "response.done"))[-1]
        assert done["response"]["id"] == created["response"]["id"]
        assert done["response"]["status_details"]["reason"] == "client_cancelled"
        await connection.response.cancel()
        assert (await until(connection, "error"))[-1]["error"]["code"] == "response_cancel_not_active"
        views = await at.settled(1)
        assert views[0]["input"]["seconds"] > 3  # the text was said to it
    await at.empty()  # no grace for who cannot come back


async def test_an_answer_is_cut_short_and_addressed(at: Endpoint) -> None:
    async with client(at).realtime.connect(model="any", extra_query={"max_kv_tokens": "100"}) as connection:
        seen = await speaks(connection)
        item = seen[-1]["item_id"]
        await connection.response.cancel()
        done = (await until(connection, "response.done"))[-1]
        assert done["response"]["output"][0]["status"] == "incomplete"
        await connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=0)
        await until(connection, "conversation.item.truncated")
        await connection.conversation.item.retrieve(item_id=item)
        kept = (await until(connection, "conversation.item.retrieved"))[-1]["item"]
        assert kept["content"][0]["transcript"] == ""
        await connection.conversation.item.delete(item_id=item)
        await until(connection, "conversation.item.deleted")
        (view,) = await at.settled(1)
        assert view["config"]["max_kv_tokens"] == 100


async def test_who_finds_no_place_is_refused_and_may_come_back(at: Endpoint) -> None:
    async with client(at).realtime.connect(model="any") as connection:
        await until(connection, "session.created")
        with pytest.raises(InvalidStatus) as caught:
            async with client(at).realtime.connect(model="any"):
                pass
        assert caught.value.response.status_code == 503
        assert b"resource_exhausted" in (caught.value.response.body or b"")
        await connection.input_audio_buffer.append(audio=noise(2))
        await until(connection, "input_audio_buffer.speech_started")
    await at.empty()
    async with client(at).realtime.connect(model="any") as connection:
        await until(connection, "session.created")
    await at.empty()


async def test_keys_and_pages() -> None:
    async with endpoint(access=Access(keys=("secret",))) as at:
        url = f"{at.address.replace('http', 'ws')}/v1/realtime"
        with pytest.raises(InvalidStatus) as caught:
            async with client(at, "wrong").realtime.connect(model="any"):
                pass
        assert caught.value.response.status_code == 401
        protocols = [Subprotocol("realtime"), Subprotocol("openai-insecure-api-key.secret")]
        async with connect(url, subprotocols=protocols) as socket:  # as a browser does
            assert socket.subprotocol == "realtime"
        with pytest.raises(InvalidStatus) as caught:
            async with connect(url, additional_headers={"Origin": "https://elsewhere.example"}):
                pass
        assert caught.value.response.status_code == 403
        with pytest.raises(InvalidStatus) as caught:
            async with client(at, "secret").realtime.connect(model="any", extra_query={"max_kv_tokens": "x"}):
                pass
        assert caught.value.response.status_code == 400


async def test_duplex_numbers_its_events_and_resumes(at: Endpoint) -> None:
    at.desk.config = type(at.desk.config)(**{**at.desk.config.__dict__, "resume_grace_s": 60.0})
    duplex = {"duplex": "1", "max_kv_tokens": "60"}
    async with client(at).realtime.connect(model="any", extra_query=duplex) as connection:
        (created,) = await until(connection, "session.created")
        session, token = created["session_id"], created["resume_token"]
        assert created["session"]["capabilities"]["supports_session_resume"] is True
        await connection.send({"type": "session.heartbeat"})  # type: ignore[arg-type, misc, typeddict-item]
        await until(connection, "session.heartbeat_ack", known=False)
        seen = await speaks(connection)
        numbers = [e["server_event_seq"] for e in seen]
        assert numbers == list(range(1, len(seen) + 1))
        await until(connection, "response.speak", known=False)
        response = seen[-1]["response_id"]
        ack = {"type": "playback.ack", "response_id": response, "played_ms": 120, "committed_ms": 100}
        await connection.send({**ack, "response_id": "resp_long_over"})  # type: ignore[arg-type, misc, typeddict-item]
        await connection.send(ack)  # type: ignore[arg-type, misc, typeddict-item]
        played = (await until(connection, "playback.acknowledged", known=False))[-1]
        assert (played["response_id"], played["committed_ms"]) == (response, 100)
        connection._connection.transport.abort()  # the line is lost

    async def resume(since: int, token: str = token) -> Any:
        manager = client(at).realtime.connect(model="any", extra_query={**duplex, "resume": "1"})
        again = await manager.enter()
        about = {"session_id": session, "resume_token": token, "last_received_server_event_seq": since}
        await again.send({"type": "session.resume", **about})  # type: ignore[arg-type, misc, typeddict-item]
        return again

    wrong = await resume(0, "guessed")
    assert (await until(wrong, "error", known=False))[-1]["error"]["code"] == "invalid_resume_token"
    last = played["server_event_seq"]
    again = await resume(last - 3)
    (resumed,) = await until(again, "session.resumed", known=False)
    assert (resumed["session_id"], resumed["attachment_generation"]) == (session, 2)
    missed = await until(again, "playback.acknowledged", known=False)
    assert [e["server_event_seq"] for e in missed] == [last - 2, last - 1, last]
    await again.input_audio_buffer.append(audio=noise(2))
    onward = await until(again, "response.listen", "response.speak", known=False)
    assert onward[0]["server_event_seq"] == last + 1

    third = await resume(onward[-1]["server_event_seq"])
    await until(third, "session.resumed", known=False)
    await until(again, "session.replaced", known=False)
    await third.send({"type": "session.close"})
    closed = await until(third, "session.closed", known=False)
    assert closed[-1]["reason"] == "user_stop"
    await at.empty()
    late = await resume(0)
    assert (await until(late, "error", known=False))[-1]["error"]["code"] == "session_resume_expired"
