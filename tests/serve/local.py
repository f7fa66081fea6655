"""Actors without Ray: `handle.method.remote(...)` runs the coroutine in this event loop."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ray.exceptions import RayActorError

from a2t.models.tiny import TinyDuplex, random_tiny
from serve_apps.messages import EngineLoad, Ticket
from serve_apps.session_actor import Limits, SessionActor


class Method:
    def __init__(self, function: Callable[..., Any]):
        self.remote = lambda *args: asyncio.ensure_future(function(*args))


class Handle:
    """What goes to and fro is copied, as between processes. `broken`: set to an exception to let every call fail with
    it, as calls to a dead actor do."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.broken: Exception | None = None

    def __getattr__(self, name: str) -> Method:
        async def call(*args: Any) -> Any:
            args = tuple([copy.deepcopy(await a if inspect.isawaitable(a) else a) for a in args])  # references: values
            if self.broken is not None:
                raise self.broken
            answer = getattr(self.actor, name)(*args)
            return copy.deepcopy(await answer if inspect.isawaitable(answer) else answer)

        return Method(call)


class LocalEngines:
    """`Engines` of this process, by name."""

    def __init__(self, handles: Mapping[str, Handle]):
        self.handles = dict(handles)

    async def loads(self) -> list[EngineLoad]:
        return [await h.load.remote() for h in self.handles.values() if h.broken is None]

    async def reserve(self, engine: str, session: str, urgent: bool = False) -> bool:
        return bool(await self.handles[engine].reserve.remote(session, urgent))

    async def cancel(self, engine: str, session: str) -> None:
        await self.handles[engine].close.remote(session)

    async def handle(self, engine: str) -> Handle | None:
        return self.handles.get(engine)


class LocalSessions:
    """Session actors of this process, on one engine."""

    def __init__(self, engine: Handle, limits: Limits | None = None):
        self.engine, self.limits = engine, limits
        self.actors: dict[str, Handle] = {}

    async def start(self, session_id: str, ticket: Ticket) -> Handle:
        assert ticket.engine is not None
        engines = LocalEngines({ticket.engine: self.engine})
        self.actors[session_id] = Handle(SessionActor(session_id, engines, ticket.engine, self.limits))
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


def adapted_model(adapter: int = 0) -> TinyDuplex:
    """The same, with small changes to its output matrix, another one for each `adapter` but 0."""
    model = small_model()
    if adapter:
        matrix = model.modules.llm.lm_head.weight
        with torch.no_grad():
            matrix += 0.01 * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(adapter))
    return model
