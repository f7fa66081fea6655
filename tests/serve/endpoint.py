"""All of the endpoint but Ray, in this process: real sockets, a real engine, a small random model."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from openbmb_realtime import RealtimeClient

from serve_apps.call import GatewayConfig
from serve_apps.desk import Desk
from serve_apps.engine_host import EngineHost, HostConfig
from serve_apps.placement import Fleet, Placement
from serve_apps.rest import Rest
from serve_apps.session_actor import Limits
from serve_apps.web import add_page
from tests.serve.local import Handle, LocalEngines, LocalSessions

MODEL = "random"
SMALL = "tests.serve.local:small_model"
ENGINE = "engine/local"


@dataclass
class Endpoint:
    address: str
    other_address: str  # of another gateway, which knows nothing of this one
    desk: Desk
    placement: Placement
    sessions: LocalSessions
    host: EngineHost

    @property
    def socket(self) -> str:
        return f"{self.address.replace('http', 'ws')}/v1/realtime?mode=audio&model={MODEL}"

    def client(self) -> RealtimeClient:
        return RealtimeClient(api_key="unused", base_url=self.address, connect_timeout=60)

    async def get(self, path: str) -> Any:
        async with httpx.AsyncClient(timeout=60) as http:
            return await http.get(self.address + path)

    async def settled(self, live: int) -> list[dict[str, Any]]:
        """The sessions, once `live` of them are neither closed nor waiting."""
        async with asyncio.timeout(60):
            while True:
                sessions: list[dict[str, Any]] = (await self.get("/v1/sessions")).json()["data"]
                if sum(s["state"] in ("live", "paused") for s in sessions) == live:
                    return sessions
                await asyncio.sleep(0.05)

    async def empty(self) -> None:
        """Waits until nothing is held by anybody."""
        async with asyncio.timeout(60):
            while (await self.host.load()).sessions or self.sessions.actors or self.placement.leased:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def endpoint(
    rows: int = 2, limits: Limits | None = None, model: str = SMALL, capacity: int = 1024, **config: Any
) -> AsyncIterator[Endpoint]:
    """`config`: of the gateway, where it differs."""
    host = EngineHost(ENGINE, "node", HostConfig(model=model, rows=rows, capacity=capacity, max_load=1e6))
    engine = host._loop._engine  # what is decoded must not depend on the speed of the machine
    engine.config = replace(engine.config, side_channel_budget_s=None)
    engines = LocalEngines({ENGINE: Handle(host)})
    placement = Placement(Fleet(engines.loads, engines.reserve, engines.cancel))
    sessions = LocalSessions(engines.handles[ENGINE], limits)
    settings = GatewayConfig(**{"models": (MODEL,), "resume_grace_s": 0.5, **config})
    desk, another = (Desk(Handle(placement), sessions, settings) for _ in range(2))
    rest = Rest(Handle(placement), sessions, engines, settings)
    async with served(gateway(desk, rest)) as address, served(gateway(another, rest)) as other_address:
        yield Endpoint(address, other_address, desk, placement, sessions, host)
    host.stop()


def gateway(desk: Desk, rest: Rest) -> FastAPI:
    api = FastAPI()
    add_page(api)
    api.websocket("/v1/realtime")(desk.realtime)
    api.get("/healthz")(rest.health)
    api.get("/v1/models")(rest.models)
    api.get("/v1/sessions")(rest.list_sessions)
    api.get("/v1/sessions/{session_id}")(rest.show_session)
    api.post("/v1/sessions/{session_id}/query")(rest.query_session)
    api.delete("/v1/sessions/{session_id}")(rest.end_session)
    return api


@asynccontextmanager
async def served(api: FastAPI) -> AsyncIterator[str]:
    """Over a real socket; `http://127.0.0.1:PORT`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(api, port=port, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    await serving
