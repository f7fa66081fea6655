"""An engine's process as the others reach it, and how it is made. Whoever holds a handle of an actor has Ray import the
module of its class: this one is without torch, so that session actors, gateways and placement start quickly and stay
small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from a2t.duplex.pace import EngineConfig

MAX_LOAD = 0.85
"""An engine takes another conversation while the units of all of them fit into this share of each second."""
EMBEDDED = "serve_apps.models:embedded"
METHODS = (
    *("load", "stats", "health", "reserve", "drain", "open", "push", "poll", "close", "book", "restore"),
    *("seal", "parcel", "adopt", "moved", "query", "query_record", "say"),
)


@dataclass(frozen=True)
class HostConfig:
    """How an engine is made. `model` is `module:function`, called with `model_options`, that returns a DuplexModel."""

    model: str = EMBEDDED
    model_options: dict[str, Any] = field(default_factory=dict)
    rows: int = 4
    capacity: int = 16_384
    threads: int = 1
    max_load: float = MAX_LOAD
    text_tier: Literal["grow", "fold"] = "fold"
    """Where the text alone outgrows the budget: `fold` lets the oldest text leave the cache (it stays in the
    session's transcript), so that conversations of hours hold it; `grow` exceeds it."""
    side_channel_budget_s: float | None = EngineConfig.side_channel_budget_s  # None: it takes the time that it takes
    promise_s: float = 60.0  # a promised row that is not used by then is free again
    unread_reports: int = 256
    reader_grace_s: float = 90.0  # a conversation that no session actor polls is closed


class EngineActor:
    """`EngineHost`, which is imported where its process runs."""

    def __init__(self, *args: Any, **options: Any):
        from serve_apps.engine_host import EngineHost

        self._host = EngineHost(*args, **options)


def _forward(name: str) -> Callable[..., Any]:
    async def method(self: EngineActor, *args: Any) -> Any:
        return await getattr(self._host, name)(*args)

    method.__name__, method.__qualname__ = name, f"EngineActor.{name}"  # as Ray shows it
    return method


for _name in METHODS:
    setattr(EngineActor, _name, _forward(_name))
