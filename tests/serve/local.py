"""Actors without Ray: `handle.method.remote(...)` runs the coroutine in this event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError

from a2t.models.tiny import TinyDuplex, random_tiny
from serve_apps.messages import Ticket
from serve_apps.session_actor import SessionActor


class Method:
    def __init__(self, function: Callable[..., Any]):
        self.remote = lambda *args: asyncio.ensure_future(function(*args))


class Handle:
    """`broken`: set to an exception to let every call fail with it, as calls to a dead actor do."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.broken: Exception | None = None

    def __getattr__(self, name: str) -> Method:
        async def call(*args: Any) -> Any:
            if self.broken is not None:
                raise self.broken
            answer = getattr(self.actor, name)(*args)
            return await answer if inspect.isawaitable(answer) else answer

        return Method(call)


class LocalSessions:
    """Session actors of this process, on one engine."""

    def __init__(self, engine: Handle):
        self.engine = engine
        self.actors: dict[str, Handle] = {}

    async def start(self, session_id: str, ticket: Ticket) -> Handle:
        assert ticket.engine is not None
        actor = SessionActor(session_id, self.engine, ticket.engine)
        self.actors[session_id] = Handle(actor)
        return self.actors[session_id]

    async def find(self, session_id: str) -> Handle | None:
        return self.actors.get(session_id)

    def end(self, session: Handle) -> None:
        session.broken = RayActorError()
        for task in session.actor._tasks:
            task.cancel()
        self.actors = {name: s for name, s in self.actors.items() if s is not session}


def small_model(seed: int = 0) -> TinyDuplex:
    """Random weights: it listens, speaks and writes nonsense, but in the grammar of a unit."""
    return random_tiny(seed)
