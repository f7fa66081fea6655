"""The endpoint: a Serve ingress with the realtime websocket and the REST views, and session actors on Ray.

Annotations are evaluated here (no `from __future__ import annotations`): Serve sends the class by value, and FastAPI
could not look their names up where it arrives.
"""

import asyncio
from typing import Any

import ray
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_apps.call import GatewayConfig
from serve_apps.desk import Desk
from serve_apps.messages import Ticket
from serve_apps.session_actor import Limits, SessionActor

Session = ray.remote(SessionActor)


class RaySessions:
    """One named, detached actor a session, in the application's namespace, beside its engine where there is room."""

    def __init__(self, namespace: str, limits: Limits):
        self._namespace, self._limits = namespace, limits

    async def start(self, session_id: str, ticket: Ticket) -> Any:
        return await asyncio.to_thread(self._start, session_id, ticket)

    def _start(self, session_id: str, ticket: Ticket) -> Any:
        assert ticket.engine is not None
        assert ticket.node is not None
        engine = ray.get_actor(ticket.engine, namespace=self._namespace)
        return Session.options(
            name=_name(session_id),
            namespace=self._namespace,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(ticket.node, soft=True),
        ).remote(session_id, engine, ticket.engine, self._limits)

    async def find(self, session_id: str) -> Any | None:
        try:
            return await asyncio.to_thread(ray.get_actor, _name(session_id), namespace=self._namespace)
        except ValueError:  # not started yet, or gone
            return None

    def end(self, session: Any) -> None:
        ray.kill(session)


def _name(session_id: str) -> str:
    return f"session/{session_id}"


api = FastAPI(title="a2t", docs_url=None, redoc_url=None)


@serve.deployment(name="gateway", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
@serve.ingress(api)
class Gateway:
    def __init__(self, placement: Any, config: GatewayConfig, namespace: str, limits: Limits):
        self.desk = Desk(placement, RaySessions(namespace, limits), config)

    @api.websocket("/v1/realtime")
    async def realtime(self, ws: WebSocket) -> None:
        await self.desk.realtime(ws)

    @api.get("/healthz")
    async def health(self) -> JSONResponse:
        return await self.desk.health()

    @api.get("/v1/models")
    async def models(self, request: Request) -> JSONResponse:
        return await self.desk.models(request)

    @api.get("/v1/sessions")
    async def list_sessions(self, request: Request) -> JSONResponse:
        return await self.desk.list_sessions(request)

    @api.get("/v1/sessions/{session_id}")
    async def show_session(self, session_id: str, request: Request) -> JSONResponse:
        return await self.desk.show_session(session_id, request)
