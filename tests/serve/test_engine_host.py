"""The engine host with a real engine and a small random model, without Ray; the session actor on top of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from ray.exceptions import RayActorError

from a2t.duplex.conversation import ConversationConfig
from a2t.duplex.engine import Engine, EngineConfig
from serve_apps.engine_host import EngineHost, HostConfig, load_model
from serve_apps.messages import Failure, SessionOptions, UnitReport
from serve_apps.session_actor import Limits, SessionActor
from tests.serve.local import Handle, small_model

CONFIG = HostConfig(model="tests.serve.local:small_model", rows=2, capacity=1024)


@pytest.fixture
async def host() -> AsyncIterator[EngineHost]:
    host = EngineHost("engine/test", "node", CONFIG)
    yield host
    host.stop()


async def opened(host: EngineHost, name: str, options: SessionOptions | None = None) -> None:
    assert await host.reserve(name)
    assert isinstance(await host.open(name, options or SessionOptions()), dict)


async def fetch(host: EngineHost, name: str, units: int) -> list[UnitReport]:
    """Polls until that many units came."""
    reports: list[UnitReport] = []
    async with asyncio.timeout(30):
        while len(reports) < units:
            batch = await host.poll(name, len(reports) - 1, 1.0)
            assert batch.end is None, batch.end
            reports += batch.reports
    return reports


async def test_units_are_what_the_engine_makes_alone(host: EngineHost) -> None:
    audio = np.random.default_rng(1).standard_normal(12 * 16_000).astype(np.float32) * 0.1
    await opened(host, "a")
    await opened(host, "b")
    for n in range(24):  # half seconds, both conversations at once
        for name in "ab":
            await host.push(name, n + 1, audio[n * 8000 : (n + 1) * 8000], False)
    a, b = await asyncio.gather(fetch(host, "a", 12), fetch(host, "b", 12))

    engine = Engine(small_model(), rows=1, capacity=1024, config=EngineConfig(side_channel_budget_s=None))
    conversation = engine.open(ConversationConfig())
    engine.push(conversation, audio)
    expected = engine.run()
    for (_, result, stats), *reports in zip(expected, a, b, strict=True):
        for r in reports:
            assert (r.unit, r.listening, r.end_of_turn) == (result.unit, result.listening, result.end_of_turn)
            assert r.transcript == result.transcript_text.strip()
            assert r.total == stats.total_residents
            assert r.residents["audio"] == 10 * (r.unit + 1)
    # the text of a turn is the sum of its pieces
    turn = [result for _, result, _ in expected]
    assert any(r.response_text for r in turn), "the random model never spoke: choose another seed"
    said = "".join(r.response for r in a).split()
    assert said == [w for r in turn for w in r.response_text.split()]
    prompt = len(conversation.journal.prefix_ids)
    assert prompt + sum(r.positions for r in a) == sum(a[-1].residents.values())


async def test_speech_comes_with_the_words(host: EngineHost) -> None:
    audio = np.random.default_rng(1).standard_normal(12 * 16_000).astype(np.float32) * 0.1
    await opened(host, "a")
    await opened(host, "mute", SessionOptions(speech=False))
    for name in ("a", "mute"):
        await host.push(name, 1, audio, False)
    for r in await fetch(host, "a", 12):
        spoken = 0 if r.speech_S is None else len(r.speech_S)
        assert (spoken > 2400) == bool(r.response), f"{spoken} samples for {r.response!r}"
    assert all(r.speech_S is None for r in await fetch(host, "mute", 12))


async def test_settings_reach_the_conversation(host: EngineHost, second: np.ndarray) -> None:
    assert await host.reserve("a")
    given = await host.open("a", SessionOptions(system_prompt="w1 w2 w3", budget=40, temperature=0.7, max_tokens=3))
    assert isinstance(given, dict)
    assert (given["max_kv_tokens"], given["prefix_tokens"], given["temperature"]) == (40, 3, 0.7)
    await host.push("a", 1, np.tile(second, 15), False)
    reports = await fetch(host, "a", 15)
    assert reports[0].evicted == 0
    assert sum(r.evicted for r in reports) > 0
    assert all(r.residents["prefix"] == 3 for r in reports)


async def test_rows_are_promised_used_and_given_back(host: EngineHost) -> None:
    assert await host.reserve("a")
    assert await host.reserve("a")  # again: still one row
    await opened(host, "b")
    assert not await host.reserve("c")
    assert (await host.load()).rows_free == 0
    refused = await host.open("c", SessionOptions())
    assert isinstance(refused, Failure)
    assert refused.code == "no_row"
    unknown = await host.open("a", SessionOptions(system_prompt="no such words"))
    assert isinstance(unknown, Failure)
    assert unknown.code == "invalid_config"
    await host.close("b")
    await host.close("b")
    await opened(host, "c")
    assert set((await host.load()).sessions) == {"a", "c"}


async def test_a_promise_lapses() -> None:
    host = EngineHost("engine/test", "node", HostConfig(model=CONFIG.model, rows=1, capacity=512, promise_s=0.0))
    assert await host.reserve("late")
    await asyncio.sleep(0.01)
    assert await host.reserve("next")
    host.stop()


async def test_a_repeated_push_changes_nothing(host: EngineHost, second: np.ndarray) -> None:
    await opened(host, "a")
    for number in (1, 1, 2, 1, 2):
        await host.push("a", number, second, False)
    await fetch(host, "a", 2)
    assert (await host.poll("a", 1, 0.1)).reports == []


async def test_force_listen_without_audio_holds_for_the_next(host: EngineHost, second: np.ndarray) -> None:
    await opened(host, "a")
    for unit in range(6):
        await host.push("a", 2 * unit + 1, np.zeros(0, np.float32), True)
        await host.push("a", 2 * unit + 2, second, False)
    assert all(r.listening for r in await fetch(host, "a", 6))


async def test_a_full_row_ends_its_conversation_alone(second: np.ndarray) -> None:
    host = EngineHost("engine/test", "node", HostConfig(model=CONFIG.model, rows=2, capacity=256))
    await opened(host, "big", SessionOptions(budget=10_000))
    await opened(host, "small", SessionOptions(budget=0))
    for n in range(30):
        for name in ("big", "small"):
            await host.push(name, n + 1, second, False)
    async with asyncio.timeout(20):
        while (end := (await host.poll("big", 10**6, 1.0)).end) is None:
            pass
    assert end.failure is not None
    assert end.failure.code == "cache_full"
    assert (await host.poll("small", -1, 1.0)).end is None
    await host.close("big")
    assert await host.reserve("another")
    host.stop()


async def test_model_names_that_are_none() -> None:
    with pytest.raises(ValueError, match="module:function"):
        load_model("embedded", {})


# the session actor


async def session_on(host: EngineHost, name: str, **limits: float) -> tuple[SessionActor, Handle]:
    handle = Handle(host)
    assert await host.reserve(name)
    session = SessionActor(name, handle, "engine/test", Limits(**limits))
    await session.start(SessionOptions())
    return session, handle


async def test_a_session_keeps_transcript_counts_and_state(host: EngineHost, second: np.ndarray) -> None:
    session, _ = await session_on(host, "s", pause_after_s=0.3)
    reports: list[UnitReport] = []
    for n in range(8):
        await session.append(n + 1, second, False)
        await session.append(n + 1, second, False)  # a repeated call
    async with asyncio.timeout(20):
        while len(reports) < 8:
            reports += (await session.events(len(reports) - 1, 1.0)).reports
    view = session.view()
    assert [r.unit for r in reports] == list(range(8))
    assert (view["units"], view["input"]) == (8, {"appends": 8, "seconds": 8.0})
    assert view["memory"]["residents"] == reports[-1].residents
    assert view["memory"]["total"] == reports[-1].total
    assert [t["unit"] for t in view["transcript"]] == [r.unit for r in reports if r.transcript or r.response]
    await asyncio.sleep(0.35)
    assert session.state == "paused"
    await session.append(9, second, False)
    assert session.state == "live"
    closed = await session.finish("user_stop")
    assert (closed["state"], closed["end"]) == ("closed", {"reason": "user_stop", "failure": None})
    assert (await host.load()).sessions == ()


async def test_a_reader_that_asks_again_gets_the_same(host: EngineHost, second: np.ndarray) -> None:
    session, _ = await session_on(host, "s")
    await session.append(1, np.tile(second, 3), False)
    async with asyncio.timeout(20):
        while len((await session.events(-1, 1.0)).reports) < 3:
            await asyncio.sleep(0.02)
    again = await session.events(0, 1.0)
    assert [r.unit for r in again.reports] == [1, 2]
    await session.finish("done")


@pytest.mark.parametrize(
    ("limits", "code"), [({"backlog_s": 20.0}, "input_overflow"), ({"unread_reports": 4}, "slow_reader")]
)
async def test_who_floods_or_does_not_read_is_ended_alone(
    host: EngineHost, second: np.ndarray, limits: dict[str, float], code: str
) -> None:
    session, _ = await session_on(host, "bad", **limits)
    other, _ = await session_on(host, "good")
    await session.append(1, np.tile(second, 30 if code == "input_overflow" else 8), False)
    async with asyncio.timeout(20):
        while session.state != "closed":
            await asyncio.sleep(0.02)
    end = (await session.events(-1, 1.0)).end
    assert end is not None
    assert end.failure is not None
    assert end.failure.code == code
    assert (await host.load()).sessions == ("good",)
    await other.append(1, second, False)
    assert len((await other.events(-1, 10.0)).reports) == 1
    await other.finish("done")


async def test_a_lost_engine_ends_the_session_with_its_transcript(host: EngineHost, second: np.ndarray) -> None:
    session, handle = await session_on(host, "s", poll_s=0.2)
    await session.append(1, np.tile(second, 4), False)
    async with asyncio.timeout(20):
        while session.view()["units"] < 4:
            await asyncio.sleep(0.02)
    handle.broken = RayActorError()
    await session.append(2, second, False)
    batch = await session.events(-1, 1.0)
    assert len(batch.reports) == 4
    assert batch.end is not None
    assert batch.end.failure is not None
    assert batch.end.failure.code == "engine_lost"
    assert session.view()["units"] == 4


async def test_a_caller_that_stops_waiting_breaks_nothing(host: EngineHost, second: np.ndarray) -> None:
    for attempt in range(20):
        name = f"s{attempt}"
        assert await host.reserve(name)
        opening = asyncio.create_task(host.open(name, SessionOptions()))
        await asyncio.sleep(0.002 * (attempt % 5))
        opening.cancel()
        closing = asyncio.create_task(host.close(name))
        await asyncio.sleep(0)
        closing.cancel()
    await opened(host, "a")
    await opened(host, "b")  # both rows are free again
    await host.push("b", 1, second, False)
    await fetch(host, "b", 1)
