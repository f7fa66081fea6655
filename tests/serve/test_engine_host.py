"""The engine host with a real engine and a small random model, without Ray; the session actor on top of it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator

import numpy as np
import pytest

from a2t.duplex.conversation import ConversationConfig
from a2t.duplex.engine import Engine, EngineConfig
from serve_apps.engine_actor import METHODS, EngineActor
from serve_apps.engine_host import EngineHost, HostConfig
from serve_apps.messages import Failure, SessionOptions, UnitReport
from serve_apps.models import load_model
from tests.serve.local import small_model

CONFIG = HostConfig(model="tests.serve.local:small_model", rows=2, capacity=1024, side_channel_budget_s=None)


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
    cold = await host.open("a", SessionOptions(temperature=1e-38))  # logits over it would be infinite
    assert isinstance(cold, Failure)
    assert cold.code == "invalid_config"
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


def test_its_actor_has_all_that_it_can_be_asked() -> None:
    asked = {name for name, f in vars(EngineHost).items() if inspect.iscoroutinefunction(f) and name[0] != "_"}
    assert set(METHODS) == asked
    assert all(inspect.iscoroutinefunction(getattr(EngineActor, name)) for name in METHODS)


async def test_model_names_that_are_none() -> None:
    with pytest.raises(ValueError, match="module:function"):
        load_model("embedded", {})


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
