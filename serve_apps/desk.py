"""The front desk: who may call, the calls themselves, and the REST views of sessions. No Ray of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request, WebSocket
from fastapi.responses import JSONResponse
from ray.exceptions import RayActorError

from serve_apps.call import Call, GatewayConfig, Sessions, hold
from serve_apps.events import Closed, Dialect
from serve_apps.limits import WireError
from serve_apps.messages import Failure, SessionEnd, View
from serve_apps.realtime import Realtime
from serve_apps.wire import POLICY_VIOLATION, Wire


class Desk:
    """`placement` is a handle (`placement.method.remote(...)`) to a Placement."""

    def __init__(self, placement: Any, sessions: Sessions, config: GatewayConfig):
        self.placement, self.sessions, self.config = placement, sessions, config

    async def realtime(self, ws: WebSocket) -> None:
        """`/v1/realtime?mode=audio&model=NAME`: one conversation."""
        dialect = self._dialect(ws)
        offered = [p.strip() for p in ws.headers.get("sec-websocket-protocol", "").split(",")]
        await ws.accept(subprotocol=dialect.subprotocol if dialect.subprotocol in offered else None)
        async with Wire(ws, self.config.traffic) as wire:
            try:
                self._admit(ws)
            except WireError as refusal:
                end = SessionEnd(refusal.code, Failure(refusal.code, refusal.message))
                for frame in dialect.tell(Closed(end)):
                    wire.send(frame)
                await wire.close(POLICY_VIOLATION)
                return
            call = Call(self.placement, self.sessions, self.config)
            await hold(wire, call, dialect, self.config.idle_timeout_s)

    def _dialect(self, ws: WebSocket) -> Dialect:
        """By subprotocol and query."""
        return Realtime(ws.query_params.get("model") or self.config.models[0], ws.query_params)

    def _admit(self, ws: WebSocket) -> None:
        """WireError for whoever may not call, or asks for what is not here."""
        self.config.access.check(ws.client.host if ws.client else None, ws.headers)
        if (mode := ws.query_params.get("mode", "audio")) != "audio":
            raise WireError("unsupported_mode", f"mode {mode[:64]!r}: this server hears audio only, mode=audio")
        model = ws.query_params.get("model") or self.config.models[0]
        if model not in self.config.models:
            raise WireError("model_not_found", f"{model[:64]!r} is not served here; see /v1/models")

    async def health(self) -> JSONResponse:
        loads = await self.placement.loads.remote()
        engines = [{"name": e.name, "rows": e.rows, "free": e.rows_free, "unit_ms": round(e.unit_ms, 2)} for e in loads]
        if not engines:
            return JSONResponse({"status": "no engine", "engines": []}, 503)
        return JSONResponse({"status": "ok", "engines": engines})

    async def models(self, request: Request) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        data = [{"id": name, "object": "model", "owned_by": "a2t"} for name in self.config.models]
        return JSONResponse({"object": "list", "data": data})

    async def list_sessions(self, request: Request) -> JSONResponse:
        """Waiting, live and recently closed sessions, without their transcripts."""
        if refusal := self._refusal(request):
            return refusal
        directory = await self.placement.directory.remote()
        live = await asyncio.gather(*(self._live(s, engine) for s, engine in directory["placed"].items()))
        views = [*directory["queued"], *live, *directory["records"]]
        return JSONResponse({"data": [{k: v for k, v in view.items() if k != "transcript"} for view in views]})

    async def show_session(self, session_id: str, request: Request) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        for last_try in (False, True):  # it may close while it is being looked up
            directory = await self.placement.directory.remote()
            known = {view["id"]: view for view in [*directory["queued"], *directory["records"]]}
            if session_id in directory["placed"]:
                view = await self._live(session_id, directory["placed"][session_id])
                if "units" in view or last_try:
                    return JSONResponse(view)
            elif session_id in known:
                return JSONResponse(known[session_id])
        return _problem(404, "session_not_found", f"no session {session_id[:64]!r} is known here")

    async def _live(self, session_id: str, engine: str) -> View:
        try:
            actor = await self.sessions.find(session_id)
            if actor is not None:
                return await asyncio.wait_for(actor.view.remote(), 5.0)
        except (RayActorError, TimeoutError):  # gone, or stuck
            pass
        return {"id": session_id, "state": "live", "engine": engine}

    def _refusal(self, request: Request) -> JSONResponse | None:
        try:
            self.config.access.check(request.client.host if request.client else None, request.headers)
        except WireError as refusal:
            return _problem(401, refusal.code, refusal.message)
        return None


def _problem(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status)
