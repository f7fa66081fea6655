"""One conversation as a named Ray actor: numbered inputs, the book, the lease on an engine's row, its state.

It stands between the socket and the engine and outlives both.  Lost: its engine, it has the cache rebuilt on another
one from the book; itself, it starts again and copies the book that its engine keeps.  Planned moves hand the cache over
as it is.  It imports no torch, so that hundreds of them fit on a node.

States: `queued` (in placement's waiting line, before there is an actor), `live`, `paused` (nothing heard for a while),
`moving` (being handed over), `restoring` (being rebuilt), `closed`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from serve_apps.book import Book
from serve_apps.durations import Limits as Limits
from serve_apps.fleet import GONE, Engines
from serve_apps.lease import RETRY_S, Lease
from serve_apps.messages import Attached, Batch, Failure, Parcel, SessionEnd, SessionOptions, UnitReport, View

log = logging.getLogger("ray.serve")
REPLACED = SessionEnd("replaced", Failure("session_replaced", "another socket has taken this conversation up"))
LOST = Failure("session_lost", "neither this conversation's process nor its engine knows it any more; call again")


class SessionActor:
    """`engine_name`: of the engine that has promised this session a row. `gone(view)` is told when the conversation
    has ended by itself and nobody was there to clear it away; `observe(view)` sets gauges."""

    def __init__(
        self,
        session_id: str,
        engines: Engines,
        engine_name: str,
        limits: Limits | None = None,
        gone: Callable[[View], Awaitable[None]] | None = None,
        observe: Callable[[View], None] | None = None,
    ):
        self.id, self._lease = session_id, Lease(session_id, engines, engine_name)
        self._limits, self._gone, self._observe = limits or Limits(), gone, observe
        self._book = Book(session_id)
        self._away = ""  # "moving" or "restoring" while it has no engine
        self._last_input = self._last_read = time.monotonic()
        self._unsent: deque[tuple[int, np.ndarray, bool]] = deque()  # inputs that the engine does not have yet
        self._gate = asyncio.Lock()  # who sends to the engine, or changes it
        self._starting, self._started = asyncio.Lock(), False
        self._news = asyncio.Event()
        self._end: SessionEnd | None = None
        self._reader, self._fetched = 1, -1  # the last unit that it has fetched
        self._tasks: list[asyncio.Task[None]] = []

    # -- the conversation --------------------------------------------------------------------------------------------

    async def start(self, options: SessionOptions, token: str = "") -> dict[str, Any] | Failure:
        """Opens the conversation on its engine; returns the settings in force, or why it cannot be opened. Whoever
        knows `token` may take it up again; the caller is reader 1."""
        async with self._starting:
            if self._started:
                return self._book.settings
            failure = Failure("engine_lost", "the engine that had a row for this conversation is gone; call again")
            engine = self._lease.engine = await self._lease.engines.handle(self._lease.name)
            if engine is None:
                return failure
            try:
                settings: dict[str, Any] | Failure = await engine.open.remote(self.id, options, token)
                book: Book | None = await engine.book.remote(self.id)
            except GONE:
                return failure
            if isinstance(settings, Failure):
                return settings
            assert book is not None
            self._begin(book)
            return settings

    @property
    def state(self) -> str:
        if self._end is not None:
            return "closed"
        if self._away:
            return self._away
        return "paused" if time.monotonic() - self._last_input > self._limits.pause_after_s else "live"

    async def append(self, number: int, pcm_S: np.ndarray, force_listen: bool, reader: int = 1) -> None:
        """The client's `number`-th input (from 1). A number seen before changes nothing, so a repeated call is safe;
        nor does what comes from a socket that has been replaced.

        Trouble ends the session, and its `events` say so.
        """
        await self._known(reader)
        if self._end is not None or number <= self._book.inputs or reader != self._reader:
            return
        self._book.hear(number, pcm_S, force_listen)
        self._unsent.append((number, pcm_S, force_listen))
        self._last_input = time.monotonic()
        if (waiting_s := self._book.backlog_s) > self._limits.backlog_s and not self._away:
            message = f"{waiting_s:.0f} s of audio wait to be processed; keep below {self._limits.backlog_s:.0f} s"
            await self.finish("input_overflow", Failure("input_overflow", message))
        elif not self._gate.locked():  # whoever holds it sends this too
            async with self._gate:
                await self._send()

    async def read(self, number: int, text: str, reader: int = 1) -> None:
        """Typed text as an input, heard as if it had been said."""
        await self._known(reader)
        if self._lease.engine is not None and number > self._book.inputs:
            await self.append(number, await self._lease.engine.say.remote(text), False, reader)

    async def query(self, question: str) -> str | Failure:
        """Answers a typed question from the transcript; the conversation goes on meanwhile."""
        await self._known(begun=False)
        if self._end is not None or self._lease.engine is None:
            return Failure("not_live", f"the conversation is {self.state}: ask again when it is live")
        try:
            answer: str | Failure = await self._lease.engine.query.remote(self.id, question)
        except GONE:
            return Failure("busy", "the conversation's engine is being replaced; ask again")
        return answer

    async def events(self, after: int, timeout: float, reader: int = 1) -> Batch:
        """Reports of the units after unit `after` (-1: all that are kept) as soon as there are any, and news of the
        state; what came long before is forgotten."""
        await self._known(reader)
        if reader != self._reader:
            return Batch(end=REPLACED)
        self._last_read = time.monotonic()
        self._fetched = max(self._fetched, after)
        self._book.fetched(after)
        if not self._book.unread(after) and self._end is None:
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout)
        if reader != self._reader:
            return Batch(end=REPLACED)
        self._last_read = time.monotonic()
        return Batch(self._book.unread(after), self._end, self.state)

    async def attach(self, token: str, after: int = -1) -> Attached | Failure:
        """Another socket takes the conversation up, with what follows unit `after`; the one before it is `replaced`."""
        await self._known()
        if self._end is not None:
            return Failure("session_closed", "this conversation has ended; open another one")
        known = self._book.token
        if not known or not secrets.compare_digest(token.encode(), known.encode()):
            return Failure("resume_refused", "the resume token is not this conversation's")
        self._reader += 1
        self._last_read = time.monotonic()
        self._news.set()
        book = self._book
        return Attached(self._reader, book.settings, book.inputs, book.units, book.used(after))

    async def detach(self, reader: int, grace_s: float) -> View | None:
        """The reader's socket is gone. Returns None once another has attached; ends the conversation, and returns what
        stays of it, if that has not happened after `grace_s` seconds."""
        await self._known(reader)
        until = time.monotonic() + grace_s
        while self._reader == reader and self._end is None and time.monotonic() < until:
            self._last_read = time.monotonic()
            await asyncio.sleep(min(0.1, grace_s))
        return await self.finish("client_gone") if self._reader == reader else None

    async def finish(self, reason: str, failure: Failure | None = None) -> View:
        """Ends the conversation, if it has not ended, and gives its row back. What waits unprocessed is dropped."""
        if self._end is None:
            self._end = SessionEnd(reason, failure)
            self._news.set()
            engine = self._lease.engine or await self._lease.engines.handle(self._lease.name)
            if engine is not None:
                with suppress(*GONE):
                    await engine.close.remote(self.id)
        return self._view()

    async def view(self) -> View:
        """What `GET /v1/sessions/{id}` shows."""
        await self._known(begun=False)
        return self._view()

    def _view(self) -> View:
        end = None if self._end is None else asdict(self._end)
        return {"id": self.id, "state": self.state, "engine": self._lease.name, "end": end, **self._book.view()}

    # -- to another engine -------------------------------------------------------------------------------------------

    async def move(self, engine_name: str, park: bool = False) -> bool:
        """Hands the conversation over, exactly as it is, if it is on this engine. False if no other has a row for it;
        `park`: it is then kept here until one has."""
        await self._known()
        async with self._gate:
            if self._end is not None or self._lease.name != engine_name or self._lease.engine is None:
                return True
            target = None if park else await self._lease.find(engine_name)
            if target is None and not park:
                return False
            old, since = self._lease.engine, time.monotonic()
            self._tell("moving")
            try:
                reports: list[UnitReport] | Failure = await old.seal.remote(self.id, self._book.units - 1)
                if isinstance(reports, Failure):
                    return True  # it is over, and the next poll says so
                self._take(reports)
                sealed = old.parcel.remote(self.id)  # a reference: what was sealed goes from engine to engine
                if target is None:
                    parcel: Parcel = await sealed
                    await old.close.remote(self.id)
                    self._lease.engine = None
                    self._tasks.append(asyncio.create_task(self._unpark(parcel)))
                    return True
                if await self._lease.take(target, lambda engine: engine.adopt.remote(self.id, sealed)):
                    await old.close.remote(self.id)
                    await self._moved(engine_name, since, exact=True)
                    return True
                await old.adopt.remote(self.id, sealed)  # it stays where it was
                return False
            except GONE:
                return False  # the old engine died meanwhile: the next poll says so
            finally:
                self._tell("")
                await self._send()

    async def _unpark(self, parcel: Parcel) -> None:
        async with self._gate:
            await self._settle("moving", lambda engine: engine.adopt.remote(self.id, parcel))

    async def _restore(self, lost: Any) -> None:
        """The engine is gone: the conversation is rebuilt on another from the book."""
        async with self._gate:
            if self._lease.engine is lost and self._end is None:
                log.warning("session %s: engine %s is lost, %d units", self.id, self._lease.name, self._book.units)
                await self._settle("restoring", lambda engine: engine.restore.remote(self.id, self._book))

    async def _settle(self, state: str, arrive: Callable[[Any], Any]) -> None:
        """Under the gate: on the first engine that has a row."""
        name, since = self._lease.name, time.monotonic()
        self._lease.engine = None
        self._tell(state)
        patience_s = self._limits.park_s if state == "moving" else self._limits.restore_s
        if await self._lease.settle(arrive, patience_s, lambda: self._end is not None):
            if self._lease.name != name:
                await self._moved(name, since, exact=state == "moving")
        elif self._end is None:
            message = "the engine of this conversation is gone and no other had a row for it"
            await self.finish("engine_lost", Failure("engine_lost", message))
        self._tell("")
        await self._send()

    async def _moved(self, old: str, since: float, exact: bool) -> None:
        log.warning("session %s goes on with unit %d on %s", self.id, self._book.units, self._lease.name)
        self._book.moved(old, self._lease.name, exact, time.monotonic() - since)
        with suppress(*GONE):
            await self._lease.engine.moved.remote(self.id, self._book.moves)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self, book: Book) -> None:
        self._book, self._started, self._fetched = book, True, book.units - 1  # the reader will say how far it is
        self._tasks = [asyncio.create_task(self._collect()), asyncio.create_task(self._watch())]

    async def _known(self, reader: int = 1, begun: bool = True) -> None:
        """A session actor that was killed starts again without a memory: its engine has one. `begun`: the caller knows
        that the conversation had begun, so that it is lost if the engine has none; others may come before `start`."""
        if not self._started:
            async with self._starting:
                if not self._started and self._end is None:
                    await self._recover(begun)
        self._reader = max(self._reader, reader)  # who attached before this process began

    async def _recover(self, begun: bool) -> None:
        if (book := await self._lease.recover()) is not None:
            log.warning("session %s: its process started again after %d units", self.id, book.units)
            self._begin(book)
        elif begun:
            self._end = SessionEnd("session_lost", LOST)

    async def _send(self) -> None:
        """Under the gate."""
        while self._unsent and self._lease.engine is not None and self._end is None:
            number, pcm_S, force_listen = self._unsent[0]
            try:
                await self._lease.engine.push.remote(self.id, number, pcm_S, force_listen)
            except GONE:
                return  # the next poll says so, and the book has them
            self._unsent.popleft()

    async def _collect(self) -> None:
        try:
            while self._end is None:
                if self._lease.engine is None:  # on its way
                    await asyncio.sleep(RETRY_S / 4)
                    continue
                engine = self._lease.engine
                try:
                    # asking for what follows unit N tells the engine that N has arrived
                    batch: Batch = await engine.poll.remote(self.id, self._book.units - 1, self._limits.poll_s)
                except GONE:
                    await self._restore(engine)
                    continue
                self._take(batch.reports)
                unread = self._book.units - 1 - self._fetched
                if batch.end is not None and engine is self._lease.engine and not self._gate.locked():
                    if batch.end.reason in ("engine_failed", "closed"):  # alive, and of no use any more
                        await self._restore(engine)
                    else:
                        await self.finish(batch.end.reason, batch.end.failure)
                elif batch.end is not None:  # of an engine that it is leaving
                    await asyncio.sleep(RETRY_S)
                elif unread > self._limits.unread_reports:
                    message = f"{unread} units of results were not fetched; read faster"
                    await self.finish("slow_reader", Failure("slow_reader", message))
        except Exception:
            log.exception("session %s failed", self.id)
            await self.finish("internal_error", Failure("internal_error", "this conversation failed on the server"))

    def _take(self, reports: list[UnitReport]) -> None:
        for report in reports:
            self._book.take(report)
        if reports:
            self._news.set()

    def _tell(self, away: str) -> None:
        self._away = away
        self._news.set()

    async def _watch(self) -> None:
        """Time-outs. A conversation without a reader (its gateway died) ends itself: detached actors outlive everything
        else."""
        limits, observed = self._limits, -math.inf
        while self._end is None:
            now = time.monotonic()
            if self._observe is not None and now >= observed + limits.observe_s:
                observed = now
                self._observe(self._view())
            unread_s, quiet_s = now - self._last_read, now - self._last_input
            reason = limits.over(unread_s, quiet_s, self._book.samples > 0, self._book.units)
            if reason is not None:
                await self.finish(reason)
            await asyncio.sleep(limits.look_s)
        while time.monotonic() - self._last_read < limits.reader_grace_s:  # whoever reads clears it away
            await asyncio.sleep(limits.look_s)
        if self._gone is not None:
            await self._gone(self._view())
