"""Which engine a conversation gets, and the waiting line when none has room.

Placement follows state and load, not a hash: a hash remaps live conversations whenever the fleet changes.  The engines
are the authority on their rows; what is kept here (the line, the leases) can be rebuilt from them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from serve_apps.messages import EngineLoad, Ticket, View

KEPT_RECORDS = 100
HOMELESS_S = 90.0
"""A lease whose session no engine has known for so long is void."""


def choose(loads: Sequence[EngineLoad], max_load: float = math.inf, urgent: bool = False) -> EngineLoad | None:
    """The engine with a free row and the most unit time to spare; None if each is full. An engine takes another
    conversation while the units of all of them fit into `max_load` of each second, or however busy it is where that is
    `urgent`: late is better than lost."""

    def demand(load: EngineLoad) -> float:
        return (len(load.sessions) + 1) * load.unit_ms / 1000.0

    free = [e for e in loads if e.rows_free > 0 and not e.draining]
    fit = [e for e in free if urgent or not e.sessions or demand(e) <= max_load]
    return min(fit, key=lambda e: (demand(e), len(e.sessions), e.name), default=None)


@dataclass
class Lease:
    engine: str
    node: str
    since: float
    seen: float  # when its engine last said so


@dataclass
class Waiting:
    since: float
    last_seen: float
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Fleet:
    """How placement reaches the engines; `app.py` gives the one over Ray."""

    def __init__(
        self,
        loads: Callable[[], Awaitable[list[EngineLoad]]],
        reserve: Callable[[str, str], Awaitable[bool]],  # (engine, session): takes a row if one is free
        cancel: Callable[[str, str], Awaitable[None]],  # gives it back
    ):
        self.loads, self.reserve, self.cancel = loads, reserve, cancel


class Placement:
    """The waiting line (first come, first served), the leases, and records of closed sessions."""

    def __init__(
        self,
        fleet: Fleet,
        max_load: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        give_up_s: float = 30.0,
    ):
        self._fleet, self._max_load, self._clock, self._give_up_s = fleet, max_load, clock, give_up_s
        self._line: OrderedDict[str, Waiting] = OrderedDict()
        self._leases: dict[str, Lease] = {}
        self._records: OrderedDict[str, View] = OrderedDict()
        self._left: deque[str] = deque(maxlen=1000)
        self._durations: deque[float] = deque(maxlen=100)
        self._rows = 1
        self.engines = 0  # that answered last
        self.unhoused = 0  # conversations on no engine then, or on one that is going
        self._turn = asyncio.Lock()

    async def enter(self, session: str) -> Ticket:
        """Joins the line, and leaves it at once if there is room. Idempotent."""
        if session not in self._line and session not in self._leases:
            now = self._clock()
            self._line[session] = Waiting(now, now)
            await self.serve_line()
        return self._ticket(session)

    async def wait(self, session: str, seen: int, timeout: float) -> Ticket:
        """Returns once the session is placed, its position differs from `seen`, or after `timeout` seconds."""
        if session not in self._left:
            await self.enter(session)  # who knows nothing of it has taken another's place
        waiting = self._line.get(session)
        if waiting is not None and self._ticket(session).position == seen:
            waiting.last_seen = self._clock()
            waiting.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(waiting.changed.wait(), timeout)
            waiting.last_seen = self._clock()
        return self._ticket(session)

    async def leave(self, session: str, record: View | None = None) -> None:
        """The session is over, or gave up waiting. `record` is what stays readable of it."""
        if self._line.pop(session, None) is not None:
            self._moved()
        lease = self._leases.pop(session, None)
        self._left.append(session)
        if record is not None:
            self._records[session] = record
            while len(self._records) > KEPT_RECORDS:
                self._records.popitem(last=False)
        if lease is not None:
            self._durations.append(self._clock() - lease.since)
            await self._fleet.cancel(lease.engine, session)
        await self.serve_line()

    async def forget(self, session: str) -> None:
        """What was kept of a closed session is no longer readable."""
        self._records.pop(session, None)

    async def serve_line(self) -> None:
        """Gives rows to the head of the line while there are any. To be called now and then: rows come free by
        themselves when an engine starts or a promise lapses."""
        async with self._turn:
            now = self._clock()
            for session, waiting in list(self._line.items()):
                if now - waiting.last_seen > self._give_up_s:
                    del self._line[session]
                    self._moved()
            while self._line:
                loads = await self._fleet.loads()
                self.note(loads)
                self._rows = max(1, sum(e.rows for e in loads))
                engine = choose(loads, self._max_load)
                # those that look for an engine come first
                if engine is None or not self._line or self._homeless(loads) >= sum(e.rows_free for e in loads):
                    break
                session = next(iter(self._line))
                if not await self._fleet.reserve(engine.name, session):
                    break
                head = self._line.pop(session, None)
                if head is None:  # gave up while its row was being reserved
                    await self._fleet.cancel(engine.name, session)
                    continue
                now = self._clock()
                self._leases[session] = Lease(engine.name, engine.node, now, now)
                head.changed.set()
                self._moved()

    def note(self, loads: Sequence[EngineLoad]) -> None:
        """The leases as the engines have them: sessions move by themselves, and this may have started after them."""
        now = self._clock()
        self.engines = len(loads)
        for engine in loads:
            for session in engine.sessions:
                lease = self._leases.get(session)
                if lease is not None:
                    lease.engine, lease.node, lease.seen = engine.name, engine.node, now
                elif session not in self._left and session not in self._line:
                    self._leases[session] = Lease(engine.name, engine.node, now, now)
        for session, lease in list(self._leases.items()):
            if now - lease.seen > HOMELESS_S:
                del self._leases[session]
        self.unhoused = self._homeless([e for e in loads if not e.draining])

    def _homeless(self, loads: Sequence[EngineLoad]) -> int:
        """Conversations that are on none of these."""
        return len(self._leases.keys() - {s for e in loads for s in e.sessions})

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def leased(self) -> int:
        return len(self._leases)

    def _moved(self) -> None:
        for waiting in self._line.values():
            waiting.changed.set()

    def _ticket(self, session: str) -> Ticket:
        lease = self._leases.get(session)
        if lease is not None:
            return Ticket(engine=lease.engine, node=lease.node)
        if session not in self._line:
            return Ticket()  # position 0: neither waiting nor placed
        position = list(self._line).index(session) + 1
        ticket = Ticket(position=position, queue_length=len(self._line))
        if self._durations:
            mean = sum(self._durations) / len(self._durations)
            ticket = replace(ticket, estimated_wait_s=round(position * mean / self._rows, 1))
        return ticket

    def directory(self) -> dict[str, Any]:
        """Waiting and placed sessions in order, and the records of closed ones, newest last."""
        now = self._clock()
        line = [{"id": s, "state": "queued", "waiting_s": round(now - w.since, 3)} for s, w in self._line.items()]
        return {
            "queued": line,
            "placed": {s: lease.engine for s, lease in self._leases.items()},
            "records": list(self._records.values()),
        }
