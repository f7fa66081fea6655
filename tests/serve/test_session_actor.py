"""The session actor on engine hosts with real engines and a small random model, without Ray: what it keeps, and how a
conversation goes on when its engine, or its own process, is lost or replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from serve_apps.engine_host import EngineHost, HostConfig
from serve_apps.messages import Attached, Failure, SessionOptions, UnitReport
from serve_apps.session_actor import Limits, SessionActor
from tests.serve.local import Handle, LocalEngines

CONFIG = HostConfig(
    model="tests.serve.local:small_model", rows=3, capacity=1024, max_load=1e6, side_channel_budget_s=None
)
NAMES = ("engine/a", "engine/b")


@pytest.fixture
async def engines() -> AsyncIterator[LocalEngines]:
    hosts = {name: EngineHost(name, "node", CONFIG) for name in NAMES}
    yield LocalEngines({name: Handle(host) for name, host in hosts.items()})
    for host in hosts.values():
        host.stop()


@pytest.fixture
def audio() -> np.ndarray:
    return (0.1 * np.random.default_rng(1).standard_normal(16 * 16_000)).astype(np.float32)


async def session_on(
    engines: LocalEngines, name: str, engine: str = NAMES[0], options: SessionOptions | None = None, **limits: Any
) -> SessionActor:
    assert await engines.reserve(engine, name)
    session = SessionActor(name, engines, engine, Limits(**{"poll_s": 0.5, **limits}))
    assert isinstance(await session.start(options or SessionOptions(), "token"), dict)
    return session


async def until(session: SessionActor, units: int) -> list[UnitReport]:
    async with asyncio.timeout(60):
        while len(reports := (await session.events(-1, 1.0)).reports) < units:
            await asyncio.sleep(0.01)
    return reports


def stop(session: SessionActor) -> None:
    """As kill -9 does: nothing is said to anybody."""
    for task in session._tasks:
        task.cancel()


def words(reports: list[UnitReport]) -> list[tuple[Any, ...]]:
    """What a client is told but for the times and the sound."""
    return [(r.unit, r.decision, r.transcript, r.response, r.residents, r.forwards) for r in reports]


async def test_it_keeps_transcript_counts_and_state(engines: LocalEngines, second: np.ndarray) -> None:
    session = await session_on(engines, "s", pause_after_s=0.3)
    for n in range(8):
        await session.append(n + 1, second, False)
        await session.append(n + 1, second, False)  # a repeated call
    reports = await until(session, 8)
    view = await session.view()
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
    assert [e.sessions for e in await engines.loads()] == [(), ()]


async def test_a_reader_that_asks_again_gets_the_same(engines: LocalEngines, second: np.ndarray) -> None:
    session = await session_on(engines, "s")
    await session.append(1, np.tile(second, 3), False)
    await until(session, 3)
    again = await session.events(0, 1.0)
    assert [r.unit for r in again.reports] == [1, 2]
    await session.finish("done")


async def test_another_socket_takes_it_up(engines: LocalEngines, second: np.ndarray) -> None:
    session = await session_on(engines, "s")
    await session.append(1, np.tile(second, 2), False)
    await until(session, 2)
    refused = await session.attach("another")
    assert isinstance(refused, Failure)
    taken = await session.attach("token")
    assert isinstance(taken, Attached)
    assert (taken.appends, taken.units) == (1, 2)
    left = (await session.events(-1, 0.1, reader=1)).end
    assert left is not None
    assert left.reason == "replaced"
    assert [r.unit for r in (await session.events(0, 1.0, taken.reader)).reports] == [1]  # what it has missed
    gone = await session.detach(taken.reader, 0.05)
    assert gone is not None
    assert gone["end"]["reason"] == "client_gone"


@pytest.mark.parametrize(
    ("limits", "code"), [({"backlog_s": 20.0}, "input_overflow"), ({"unread_reports": 4}, "slow_reader")]
)
async def test_who_floods_or_does_not_read_is_ended_alone(
    engines: LocalEngines, second: np.ndarray, limits: dict[str, float], code: str
) -> None:
    session = await session_on(engines, "bad", **limits)
    other = await session_on(engines, "good")
    await session.append(1, np.tile(second, 30 if code == "input_overflow" else 8), False)
    async with asyncio.timeout(20):
        while session.state != "closed":
            await asyncio.sleep(0.02)
    end = (await session.events(-1, 1.0)).end
    assert end is not None
    assert end.failure is not None
    assert end.failure.code == code
    assert (await engines.loads())[0].sessions == ("good",)
    await other.append(1, second, False)
    assert len((await other.events(-1, 10.0)).reports) == 1
    await other.finish("done")


@pytest.mark.parametrize(
    ("limits", "heard", "reason"),
    [
        ({"idle_timeout_s": 0.2}, 0, "idle_timeout"),
        ({"pause_timeout_s": 0.2, "idle_timeout_s": 60.0}, 1, "pause_timeout"),
        ({"length_limit_s": 3.0}, 4, "length_limit"),
        ({"reader_grace_s": 0.2}, 0, "reader_lost"),
    ],
)
async def test_time_outs(
    engines: LocalEngines, second: np.ndarray, limits: dict[str, float], heard: int, reason: str
) -> None:
    records: list[dict[str, Any]] = []

    async def gone(view: dict[str, Any]) -> None:
        records.append(view)

    assert await engines.reserve(NAMES[0], "s")
    session = SessionActor("s", engines, NAMES[0], Limits(**limits), gone)
    await session.start(SessionOptions())
    for n in range(heard):
        await session.append(n + 1, second, False)
    async with asyncio.timeout(60):
        while session.state != "closed" or (await engines.loads())[0].sessions:
            await asyncio.sleep(0.02)
        while reason == "reader_lost" and not records:  # nobody else clears it away
            await asyncio.sleep(0.02)
    assert (await session.finish("late"))["end"]["reason"] == reason
    stop(session)


async def test_a_long_conversation_holds_its_budget_with_fold(engines: LocalEngines, audio: np.ndarray) -> None:
    text: dict[str, int] = {}
    for tier in ("fold", "grow"):
        session = await session_on(engines, tier, options=SessionOptions(budget=80, text_tier=tier))
        async with asyncio.timeout(240):
            for n in range(30):
                await session.append(n + 1, np.roll(audio, -7 * n * 16_000)[:16_000], False)
                while (view := await session.view())["units"] < n + 1:
                    await session.events(view["units"] - 1, 1.0)
        assert view["config"]["text_tier"] == tier
        text[tier] = sum(view["memory"]["residents"].get(kind, 0) for kind in ("transcript", "response"))
        said = sum(len(f"{t['transcript']} {t['response']}".split()) for t in view["transcript"])
        assert said > 80, "the random model hardly speaks: choose another seed"  # all of it is in the book
        await session.finish("done")
    assert text["fold"] < 80 < text["grow"]


# -- nothing lost


async def test_a_move_changes_nothing(engines: LocalEngines, audio: np.ndarray) -> None:
    """The continued conversation is bit for bit the one that was not moved, whenever it is moved."""
    options = SessionOptions(budget=60, temperature=0.7)
    stays = await session_on(engines, "stays", options=options)
    moves = await session_on(engines, "moves", options=options)
    here, there = NAMES
    for n in range(32):  # half seconds
        piece = audio[n * 8000 : (n + 1) * 8000]
        await asyncio.gather(stays.append(n + 1, piece, n == 20), moves.append(n + 1, piece, n == 20))
        if n in (3, 10, 11, 20, 29):
            assert await moves.move(here)
            assert moves._lease.name == there
            here, there = there, here
    assert words(await until(moves, 16)) == words(await until(stays, 16))
    held = {e.name: set(e.sessions) for e in await engines.loads()}
    assert held[here] - {"stays"} == {"moves"}
    assert held[there] - {"stays"} == set()
    for session in (stays, moves):
        await session.finish("done")


async def test_a_move_with_nowhere_to_go_waits_or_parks(engines: LocalEngines, audio: np.ndarray) -> None:
    stays = await session_on(engines, "stays")
    session = await session_on(engines, "s", restore_s=0.1)  # parked is not lost: it waits much longer
    for name in ("x", "y", "z"):
        assert await engines.reserve(NAMES[1], name)
    for s in (session, stays):
        await s.append(1, audio[: 5 * 16_000], False)
    assert not await session.move(NAMES[0])  # every row is taken: it stays where it is
    await engines.handles[NAMES[0]].drain.remote()
    assert await session.move(NAMES[0], True)
    assert (await engines.loads())[0].sessions == ("stays",)  # the engine may go
    await session.append(2, audio[5 * 16_000 : 8 * 16_000], False)  # heard meanwhile
    await stays.append(2, audio[5 * 16_000 : 8 * 16_000], False)
    await asyncio.sleep(0.3)
    assert session.state == "moving"
    await engines.cancel(NAMES[1], "y")
    assert words(await until(session, 8)) == words(await until(stays, 8))
    assert session._lease.name == NAMES[1]
    for s in (session, stays):
        await s.finish("done")


async def test_it_goes_on_when_its_engine_dies(engines: LocalEngines, audio: np.ndarray) -> None:
    session = await session_on(engines, "s")
    other = await session_on(engines, "other", NAMES[1])
    await session.append(1, audio[: 12 * 16_000 + 4000], False)
    before = await until(session, 12)
    for handle in engines.handles.values():  # none to go to before more has been heard
        handle.broken = RayActorError()
    await session.append(2, audio[12 * 16_000 + 4000 : 15 * 16_000], False)
    engines.handles[NAMES[1]].broken = None
    await other.append(1, audio[: 3 * 16_000], False)
    reports = await until(session, 15)
    assert reports[:12] == before
    assert [r.unit for r in reports] == list(range(15))
    view = await session.view()
    assert (view["engine"], view["units"], view["input"]["seconds"]) == (NAMES[1], 15, 15.0)
    assert view["memory"]["residents"]["prefix"] == before[0].residents["prefix"]
    assert len(await until(other, 3)) == 3
    for s in (session, other):
        await s.finish("done")


async def test_it_ends_with_its_transcript_when_no_engine_is_left(engines: LocalEngines, second: np.ndarray) -> None:
    session = await session_on(engines, "s", restore_s=0.3)
    await session.append(1, np.tile(second, 4), False)
    await until(session, 4)
    for handle in engines.handles.values():
        handle.broken = RayActorError()
    async with asyncio.timeout(30):
        while (batch := await session.events(-1, 1.0)).end is None:
            await asyncio.sleep(0.01)
    assert batch.end.failure is not None
    assert batch.end.failure.code == "engine_lost"
    assert len(batch.reports) == 4


async def test_it_starts_again_from_its_engines_book(engines: LocalEngines, audio: np.ndarray) -> None:
    first = await session_on(engines, "s")
    await first.append(1, audio[: 6 * 16_000], False)
    before = await until(first, 6)
    assert await first.move(NAMES[0])
    expected = await first.view()
    assert [m["to"] for m in expected["moves"]] == [NAMES[1]]
    stop(first)
    again = SessionActor("s", engines, NAMES[0], Limits())  # as Ray makes it: the same arguments, no memory
    batch = await again.events(-1, 1.0, reader=1)
    assert words(batch.reports) == words(before)
    view = await again.view()
    assert {k: v for k, v in view.items() if k != "opened_at"} == {
        k: v for k, v in expected.items() if k != "opened_at"
    }
    await again.append(1, audio[: 6 * 16_000], False)  # asked for again: nothing happens
    await again.append(2, audio[6 * 16_000 : 8 * 16_000], False)
    assert [r.unit for r in await until(again, 8)] == list(range(8))
    assert isinstance(await again.attach("token"), Attached)
    await again.finish("done")


async def test_who_looks_before_it_has_begun_ends_nothing(engines: LocalEngines, second: np.ndarray) -> None:
    assert await engines.reserve(NAMES[0], "s")
    session = SessionActor("s", engines, NAMES[0], Limits())
    assert (await session.view())["end"] is None
    assert isinstance(await session.query("anything?"), Failure)
    assert isinstance(await session.start(SessionOptions()), dict)
    await session.append(1, second, False)
    assert [r.unit for r in await until(session, 1)] == [0]
    await session.finish("done")


async def test_a_session_that_nobody_knows_says_so(engines: LocalEngines, second: np.ndarray) -> None:
    session = SessionActor("nobody", engines, NAMES[0], Limits())
    end = (await session.events(-1, 0.1)).end
    assert end is not None
    assert end.failure is not None
    assert end.failure.code == "session_lost"


async def test_force_listen_survives_the_engine(engines: LocalEngines, audio: np.ndarray) -> None:
    session = await session_on(engines, "s")
    await session.append(1, audio[: 4 * 16_000], False)
    await until(session, 4)
    await session.append(2, audio[4 * 16_000 : 4 * 16_000 + 8000], True)  # half of unit 4
    engines.handles[NAMES[0]].broken = RayActorError()
    await session.append(3, audio[4 * 16_000 + 8000 : 5 * 16_000], False)
    assert (await until(session, 5))[4].listening
    await session.finish("done")


async def test_who_takes_up_a_long_conversation_is_not_slow(engines: LocalEngines, audio: np.ndarray) -> None:
    session = await session_on(engines, "s", unread_reports=4)
    for second in range(8):  # more than may be unread, and all are read
        await session.append(second + 1, audio[second * 16_000 : (second + 1) * 16_000], False)
        while not (await session.events(second - 1, 1.0)).reports:
            pass
    await session.events(7, 0.0)
    taken = await session.attach("token", 7)
    assert isinstance(taken, Attached)
    await session.append(9, audio[:16_000], False, taken.reader)
    async with asyncio.timeout(60):
        while (await session.view())["units"] < 9:  # a unit is finished before the new socket asks for any
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    batch = await session.events(7, 1.0, taken.reader)
    assert batch.end is None and [r.unit for r in batch.reports] == [8]
