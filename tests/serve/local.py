"""Actors without Ray: `handle.method.remote(...)` runs the coroutine in this event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from a2t.models.tiny import TinyDuplex, random_tiny


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
            return await getattr(self.actor, name)(*args)

        return Method(call)


def small_model(seed: int = 0) -> TinyDuplex:
    """Random weights: it listens, speaks and writes nonsense, but in the grammar of a unit."""
    return random_tiny(seed)
