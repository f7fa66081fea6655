"""The endpoint: a Serve ingress with the realtime websocket and the REST views.

Annotations are evaluated here (no `from __future__ import annotations`): Serve sends the class by value, and FastAPI
could not look their names up where it arrives.
"""

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response
from ray import serve

from serve_apps.call import GatewayConfig
from serve_apps.departure import GOING_AWAY, deleted
from serve_apps.desk import Desk
from serve_apps.fleet import RayEngines
from serve_apps.rest import Rest
from serve_apps.session_actor import Limits
from serve_apps.sessions import RaySessions
from serve_apps.web import add_page

HEALTH_S = 2.0
"""How often Serve asks a gateway how it is; one that is to go is not asked any more."""
LOOK_S = 1.0
api = FastAPI(title="a2t", docs_url=None, redoc_url=None)
add_page(api)


@serve.deployment(
    name="gateway",
    max_ongoing_requests=10_000,
    health_check_period_s=HEALTH_S,
    health_check_timeout_s=30,
    ray_actor_options={"num_cpus": 0},
)
@serve.ingress(api)
class Gateway:
    def __init__(self, placement: Any, config: GatewayConfig, namespace: str, limits: Limits):
        sessions = RaySessions(namespace, limits, serve.get_replica_context().app_name)
        self.desk = Desk(placement, sessions, config)
        self.rest = Rest(placement, sessions, RayEngines(namespace), config)
        self._asked = time.monotonic()
        self._watching: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        self._asked = time.monotonic()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Where it goes alone, its sockets stay for a while (`linger_s`); if the application does, they end."""
        while True:
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - self._asked > 3 * HEALTH_S and await asyncio.to_thread(deleted):
                await self.desk.close(GOING_AWAY)

    @api.websocket("/v1/realtime")
    async def realtime(self, ws: WebSocket) -> None:
        await self.desk.realtime(ws)

    @api.get("/healthz")
    async def health(self) -> JSONResponse:
        return await self.rest.health()

    @api.get("/v1/models")
    async def models(self, request: Request) -> JSONResponse:
        return await self.rest.models(request)

    @api.get("/v1/sessions")
    async def list_sessions(self, request: Request) -> JSONResponse:
        return await self.rest.list_sessions(request)

    @api.get("/v1/sessions/{session_id}")
    async def show_session(self, session_id: str, request: Request) -> JSONResponse:
        return await self.rest.show_session(session_id, request)

    @api.post("/v1/sessions/{session_id}/query")
    async def query_session(self, session_id: str, request: Request) -> JSONResponse:
        return await self.rest.query_session(session_id, request)

    @api.delete("/v1/sessions/{session_id}")
    async def end_session(self, session_id: str, request: Request) -> Response:
        return await self.rest.end_session(session_id, request)
