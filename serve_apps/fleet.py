"""The engines of an application, found by name among the actors of its namespace. They are the authority on their rows:
whoever wants one asks them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any, Protocol

import ray
from ray.exceptions import ObjectLostError, RayActorError

from serve_apps.messages import EngineLoad

log = logging.getLogger("ray.serve")
ENGINE, SESSION = "engine/", "session/"
ANSWER_S = 5.0
GONE = (RayActorError, ObjectLostError)
"""What a call to an actor raises that is gone, or whose node is, with the answer it had given."""


class Engines(Protocol):
    """How engines are reached."""

    async def loads(self) -> list[EngineLoad]:
        """Every engine that answers."""

    async def reserve(self, engine: str, session: str, urgent: bool = False) -> bool:
        """Takes a row if one is free; `urgent`: however busy the engine is."""

    async def cancel(self, engine: str, session: str) -> None:
        """Gives it back."""

    async def handle(self, engine: str) -> Any | None:
        """`handle.method.remote(...)`; None once the engine is gone."""


class RayEngines:
    """`linger_s`: how long the others are waited for once one engine has answered. One that is still starting does not
    answer for a while."""

    def __init__(self, namespace: str, linger_s: float = 0.25):
        self._namespace, self._linger_s = namespace, linger_s

    async def loads(self, waiting: int | None = None) -> list[EngineLoad]:
        """`waiting`: how many wait for a row, for the engines to know."""
        hosts = await asyncio.to_thread(self._hosts)
        asked = [asyncio.create_task(self._load(host, waiting)) for host in hosts]
        answers: list[EngineLoad] = []
        timeout = ANSWER_S
        while asked:
            done, rest = await asyncio.wait(asked, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            answers += [a for task in done if (a := task.result()) is not None]
            asked = list(rest)
            if not done:
                break
            if answers:
                timeout = self._linger_s
        for task in asked:
            task.cancel()
        return answers

    async def reserve(self, engine: str, session: str, urgent: bool = False) -> bool:
        host = await self.handle(engine)
        try:
            return host is not None and await asyncio.wait_for(_ask(host.reserve.remote(session, urgent)), ANSWER_S)
        except (*GONE, TimeoutError):
            return False

    async def cancel(self, engine: str, session: str) -> None:
        host = await self.handle(engine)
        try:
            if host is not None:
                await asyncio.wait_for(_ask(host.close.remote(session)), ANSWER_S)
        except (*GONE, TimeoutError):
            log.info("engine %s is gone, and session %s's row with it", engine, session)

    async def handle(self, engine: str) -> Any | None:
        return await asyncio.to_thread(self._get, engine)

    def names(self, prefix: str = ENGINE) -> Collection[str]:
        actors = ray.util.list_named_actors(all_namespaces=True)
        return [a["name"] for a in actors if a["namespace"] == self._namespace and a["name"].startswith(prefix)]

    def _hosts(self) -> list[Any]:
        return [host for name in self.names() if (host := self._get(name)) is not None]

    def _get(self, name: str) -> Any | None:
        try:
            return ray.get_actor(name, namespace=self._namespace)
        except ValueError:  # gone since it was listed
            return None

    async def _load(self, host: Any, waiting: int | None) -> EngineLoad | None:
        try:
            return await asyncio.wait_for(_ask(host.load.remote(waiting)), ANSWER_S)
        except (*GONE, TimeoutError):
            return None


async def _ask(ref: Any) -> Any:
    """An object reference as a coroutine: `asyncio.wait_for` then never cancels what the actor does."""
    return await ref
