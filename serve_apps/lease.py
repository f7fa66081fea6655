"""A conversation's row on an engine, and how it gets one on another. No Ray of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from serve_apps.book import Book
from serve_apps.fleet import GONE, Engines
from serve_apps.messages import Failure
from serve_apps.placement import choose

log = logging.getLogger("ray.serve")
RETRY_S = 0.1

Arrive = Callable[[Any], Any]
"""Given an engine, the call with which the conversation comes to it; answers with a Failure, or None."""


class Lease:
    """`engine`: the handle of the engine called `name`; None while there is none. `node`: of the session actor; engines
    elsewhere are preferred, so that no node takes both with it."""

    def __init__(self, session: str, engines: Engines, name: str, node: str | None = None):
        self.session, self.engines, self.name, self.node = session, engines, name, node
        self.engine: Any = None

    async def recover(self) -> Book | None:
        """The book of a session whose process has lost it, or its engine from sight, where an engine still has it."""
        for load in await self.engines.loads():
            if self.session in load.sessions and (engine := await self.engines.handle(load.name)) is not None:
                with suppress(*GONE):
                    book: Book | None = await engine.book.remote(self.session)
                    if book is not None:
                        self.engine, self.name = engine, load.name
                        return book
        return None

    async def find(self, not_on: str | None = None) -> str | None:
        """An engine that has kept a row for this conversation, however busy it is."""
        loads = [e for e in await self.engines.loads() if e.name != not_on]
        best = choose([e for e in loads if e.node != self.node], urgent=True) or choose(loads, urgent=True)
        return best.name if best is not None and await self.engines.reserve(best.name, self.session, True) else None

    async def take(self, name: str, arrive: Arrive) -> bool:
        """Whether the conversation has come to the engine that keeps a row for it."""
        engine = await self.engines.handle(name)
        if engine is None:
            return False
        try:
            failure: Failure | None = await arrive(engine)
        except GONE:
            return False
        if failure is not None:
            log.warning("session %s: engine %s does not take it: %s", self.session, name, failure.message)
            await self.engines.cancel(name, self.session)
            return False
        self.engine, self.name = engine, name
        return True

    async def settle(self, arrive: Arrive, patience_s: float, over: Callable[[], bool]) -> bool:
        """On the first engine that has a row, as soon as there is one, or on one that turns out to have it still; False
        after `patience_s`, or when it is over."""
        until = time.monotonic() + patience_s
        while not over() and time.monotonic() < until:
            if await self.recover() is not None:  # out of reach for a moment only
                return True
            name = await self.find()
            if name is not None and await self.take(name, arrive):
                return True
            await asyncio.sleep(RETRY_S)
        return False
