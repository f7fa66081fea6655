"""Placement against engines that keep their own books, as engine hosts do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from serve_apps.messages import EngineLoad
from serve_apps.placement import Fleet, Placement, choose


class Engines:
    """Rows in plain dictionaries; refuses what does not fit, whatever placement believes."""

    def __init__(self, rows: dict[str, int], unit_ms: float = 0.0):
        self.rows, self.unit_ms = rows, unit_ms
        self.held: dict[str, list[str]] = {name: [] for name in rows}
        self.fleet = Fleet(self.loads, self.reserve, self.cancel)

    async def loads(self) -> list[EngineLoad]:
        await asyncio.sleep(0)
        return [EngineLoad(n, "node", rows, tuple(self.held[n]), self.unit_ms) for n, rows in self.rows.items()]

    async def reserve(self, engine: str, session: str) -> bool:
        await asyncio.sleep(0)
        if len(self.held[engine]) >= self.rows[engine]:
            return False
        self.held[engine].append(session)
        return True

    async def cancel(self, engine: str, session: str) -> None:
        if session in self.held[engine]:
            self.held[engine].remove(session)


def load(name: str, sessions: int, rows: int = 4, unit_ms: float = 100.0) -> EngineLoad:
    return EngineLoad(name, "node", rows, tuple(f"{name}{i}" for i in range(sessions)), unit_ms)


def test_choose_takes_the_engine_with_most_unit_time_to_spare() -> None:
    assert choose([]) is None
    assert choose([load("a", 4), load("b", 4)]) is None
    picked = choose([load("a", 2), load("b", 1), load("c", 3)])
    assert picked is not None
    assert picked.name == "b"
    fast_but_busier = choose([load("slow", 1, unit_ms=400), load("fast", 3, unit_ms=50)])
    assert fast_but_busier is not None
    assert fast_but_busier.name == "fast"


def test_choose_refuses_an_engine_whose_seconds_are_full() -> None:
    assert choose([load("a", 2, unit_ms=400)], 0.9) is None  # a third would take 1.2 s of each second
    assert choose([load("a", 2, unit_ms=400)], 0.9, urgent=True) is not None  # late is better than lost
    alone = choose([load("a", 0, unit_ms=4000)], 0.9)  # a slow machine still serves one
    assert alone is not None


async def test_the_line_is_first_come_first_served() -> None:
    engines = Engines({"e": 2})
    placement = Placement(engines.fleet)
    tickets = [await placement.enter(s) for s in "abcd"]
    assert [t.engine for t in tickets] == ["e", "e", None, None]
    assert [(t.position, t.queue_length) for t in tickets[2:]] == [(1, 1), (2, 2)]
    waits = [asyncio.create_task(placement.wait("c", 1, 5.0)), asyncio.create_task(placement.wait("d", 2, 5.0))]
    await asyncio.sleep(0.01)
    await placement.leave("a", {"id": "a", "state": "closed"})
    c, d = await asyncio.gather(*waits)
    assert c.engine == "e"
    assert (d.engine, d.position) == (None, 1)
    assert d.estimated_wait_s is not None
    assert engines.held == {"e": ["b", "c"]}
    assert placement.directory()["records"] == [{"id": "a", "state": "closed"}]


async def test_entering_twice_changes_nothing() -> None:
    engines = Engines({"e": 2})
    placement = Placement(engines.fleet)
    assert await placement.enter("a") == await placement.enter("a")
    assert engines.held == {"e": ["a"]}
    await placement.leave("a")
    await placement.leave("a")
    assert engines.held == {"e": []}
    assert (await placement.wait("a", 0, 0.01)).position == 0  # neither waiting nor placed


async def test_leaving_the_line_moves_the_others_up() -> None:
    placement = Placement(Engines({"e": 0}).fleet)
    for s in "abc":
        await placement.enter(s)
    waiting = asyncio.create_task(placement.wait("c", 3, 5.0))
    await asyncio.sleep(0.01)
    await placement.leave("a")
    assert (await waiting).position == 2


async def test_who_stops_asking_gives_up_the_place() -> None:
    now = [0.0]
    placement = Placement(Engines({"e": 0}).fleet, clock=lambda: now[0], give_up_s=10.0)
    await placement.enter("gone")
    now[0] = 6.0
    await placement.enter("here")
    now[0] = 12.0
    await placement.serve_line()
    assert [q["id"] for q in placement.directory()["queued"]] == ["here"]


async def test_no_row_is_given_twice_or_leaked_under_crowding() -> None:
    engines = Engines({"x": 3, "y": 2})
    placement = Placement(engines.fleet)
    most = 0

    async def caller(name: str) -> None:
        nonlocal most
        ticket = await placement.enter(name)
        while ticket.engine is None:
            ticket = await placement.wait(name, ticket.position, 1.0)
        most = max(most, sum(map(len, engines.held.values())))
        assert name in engines.held[ticket.engine]
        await asyncio.sleep(0.001)
        await placement.leave(name)

    await asyncio.gather(*(caller(f"s{i}") for i in range(60)))
    assert engines.held == {"x": [], "y": []}
    assert most == 5
    assert placement.directory() == {"queued": [], "placed": {}, "records": []}


def test_choose_leaves_an_engine_alone_that_goes() -> None:
    going = replace(load("a", 0), draining=True)
    assert choose([going], urgent=True) is None
    staying = choose([going, load("b", 3)])
    assert staying is not None
    assert staying.name == "b"


async def test_leases_follow_the_engines() -> None:
    now = [0.0]
    engines = Engines({"x": 2, "y": 2})
    placement = Placement(engines.fleet, clock=lambda: now[0])
    ticket = await placement.enter("a")
    assert ticket.engine == "x"
    engines.held = {"x": [], "y": ["a", "of-before"]}  # it has moved; another one was there before placement was
    placement.note(await engines.loads())
    assert placement.directory()["placed"] == {"a": "y", "of-before": "y"}
    engines.held = {"x": [], "y": []}
    now[0] = 100.0
    placement.note(await engines.loads())
    assert placement.directory()["placed"] == {}
    await placement.leave("a")
    engines.held["x"].append("a")  # what an engine said before it heard that the session is over
    placement.note(await engines.loads())
    assert placement.directory()["placed"] == {}


async def test_rows_are_kept_for_conversations_whose_engine_is_gone() -> None:
    engines = Engines({"x": 1, "y": 1})
    placement = Placement(engines.fleet)
    assert (await placement.enter("a")).engine == "x"
    del engines.rows["x"]
    assert (await placement.enter("new")).engine is None  # y's row is for "a", which is looking for one
    assert await engines.reserve("y", "a")
    placement.note(await engines.loads())
    assert placement.directory()["placed"] == {"a": "y"}
    engines.rows["z"] = 1
    engines.held["z"] = []
    await placement.serve_line()
    assert (await placement.enter("new")).engine == "z"


async def test_conversations_of_an_engine_that_goes_count_as_looking_for_another() -> None:
    engines = Engines({"old": 3, "new": 3})
    placement = Placement(engines.fleet)
    engines.held["old"] = ["a", "b"]
    old, new = await engines.loads()
    placement.note([old, new])
    assert placement.unhoused == 0
    placement.note([replace(old, draining=True), new])
    assert placement.unhoused == 2
    placement.note([new])
    assert placement.unhoused == 2
    placement.note([replace(new, sessions=("a", "b"))])
    assert placement.unhoused == 0
