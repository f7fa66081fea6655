"""Session actors on Ray: named and detached, so that they outlive whoever started them."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_apps.fleet import SESSION, RayEngines
from serve_apps.messages import Ticket, View
from serve_apps.metrics import SessionGauges, own_memory
from serve_apps.session_actor import Limits, SessionActor

log = logging.getLogger("ray.serve")


class RaySessions:
    """One actor a session, in the application's namespace, on a node without engines where there is one, else on
    another than its engine's: then no node takes both copies of a conversation's book with it. `app`: the Serve
    application's name."""

    def __init__(self, namespace: str, limits: Limits, app: str = ""):
        self._namespace, self._limits, self._app = namespace, limits, app
        self._engines = RayEngines(namespace, linger_s=1.0)

    async def start(self, session_id: str, ticket: Ticket) -> Any:
        busy = {load.node for load in await self._engines.loads()}
        return await asyncio.to_thread(self._start, session_id, ticket, busy)

    def _start(self, session_id: str, ticket: Ticket, busy: set[str]) -> Any:
        assert ticket.engine is not None
        assert ticket.node is not None
        nodes = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != ticket.node]
        node = random.choice([n for n in nodes if n not in busy] or nodes or [ticket.node])
        return Session.options(
            name=SESSION + session_id,
            namespace=self._namespace,
            lifetime="detached",
            num_cpus=0,
            memory=1,  # a byte: to an actor that asks for nothing at all Ray gives any node, whatever is preferred
            max_restarts=10,
            max_task_retries=10,  # every call may be repeated: inputs are numbered
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        ).remote(session_id, self._namespace, ticket.engine, self._limits, self._app)

    async def find(self, session_id: str) -> Any | None:
        try:
            return await asyncio.to_thread(ray.get_actor, SESSION + session_id, namespace=self._namespace)
        except ValueError:  # not started yet, or gone
            return None

    def end(self, session: Any) -> None:
        ray.kill(session)


class RaySessionActor(SessionActor):
    def __init__(self, session_id: str, namespace: str, engine_name: str, limits: Limits, app: str):
        super().__init__(session_id, RayEngines(namespace), engine_name, limits, self._leave, SessionGauges(session_id))
        self._app, self._lease.node = app, ray.get_runtime_context().get_node_id()

    def _view(self) -> View:
        view = super()._view()
        view["memory"]["host_uss_bytes"] = own_memory()
        return view

    async def _leave(self, record: View) -> None:
        """Nobody is there to do it: placement is told, and this process ends."""
        from ray import serve  # needed by few of these processes, and large

        try:
            placement = await asyncio.to_thread(serve.get_deployment_handle, "placement", self._app)
            await asyncio.wait_for(placement.leave.remote(self.id, record), 10.0)
        except Exception:  # the application may be gone as well
            log.exception("session %s: placement could not be told of its end", self.id)
        ray.actor.exit_actor()


Session = ray.remote(RaySessionActor)
"""Once: each `ray.remote(...)` would leave a copy of the class in Ray's store for good."""
