"""The front desk of the websocket: who may call, in which dialect. No Ray of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import WebSocket
from fastapi.responses import JSONResponse

from serve_apps.call import Call, GatewayConfig, Sessions
from serve_apps.events import Closed, Dialect
from serve_apps.hold import hold
from serve_apps.limits import WireError
from serve_apps.messages import Failure, SessionEnd
from serve_apps.openai_duplex import Kept, openai_dialect
from serve_apps.openai_realtime import with_key
from serve_apps.realtime import SUBPROTOCOL, Realtime
from serve_apps.wire import POLICY_VIOLATION, Wire

STATUS = {"resource_exhausted": 503, "api_key_required": 401, "invalid_api_key": 401, "origin_not_allowed": 403}


class Desk:
    """`placement` is a handle (`placement.method.remote(...)`) to a Placement."""

    def __init__(self, placement: Any, sessions: Sessions, config: GatewayConfig):
        self.placement, self.sessions, self.config = placement, sessions, config
        self._kept = Kept()
        self._calls: set[Call] = set()

    async def realtime(self, ws: WebSocket) -> None:
        """`/v1/realtime`: one conversation, in the dialect that subprotocol and query name."""
        offered = [p.strip() for p in ws.headers.get("sec-websocket-protocol", "").split(",")]
        if SUBPROTOCOL in offered or {"mode", "session"} & set(ws.query_params):
            await self._minicpmo(ws, offered)
        else:
            await self._openai(ws, offered)

    async def close(self, failure: Failure) -> None:
        """Ends every call, whether it is a conversation, waits in line, or has no engine just now."""
        calls = [call.close(failure.code, failure) for call in self._calls]
        await asyncio.gather(*calls, return_exceptions=True)  # one whose process is gone ends by itself

    async def _openai(self, ws: WebSocket, offered: list[str]) -> None:
        """Whoever may not call is refused before the socket opens: these clients call again at once otherwise."""
        call = Call(self.placement, self.sessions, self.config)
        try:
            self.config.access.check(ws.client.host if ws.client else None, with_key(ws.headers, offered))
            dialect = openai_dialect(self.config.models[0], ws.query_params, self._kept)
            if not dialect.resuming and not await call.enter_at_once():
                raise WireError("resource_exhausted", "every place is taken; call again later")
        except WireError as refusal:
            about = {"error": {"code": refusal.code, "message": refusal.message}}
            await ws.send_denial_response(JSONResponse(about, STATUS.get(refusal.code, 400)))
            return
        try:
            await ws.accept(subprotocol=dialect.subprotocol if dialect.subprotocol in offered else None)
        except BaseException:
            await call.leave(SessionEnd("client_gone"))
            raise
        async with Wire(ws, self.config.traffic) as wire:
            await self._hold(wire, call, dialect)

    async def _minicpmo(self, ws: WebSocket, offered: list[str]) -> None:
        """`?mode=audio&model=NAME`, subprotocol `map.realtime`."""
        dialect = Realtime(ws.query_params.get("model") or self.config.models[0], ws.query_params)
        await ws.accept(subprotocol=dialect.subprotocol if dialect.subprotocol in offered else None)
        async with Wire(ws, self.config.traffic) as wire:
            try:
                self._admit(ws, offered)
            except WireError as refusal:
                end = SessionEnd(refusal.code, Failure(refusal.code, refusal.message))
                for frame in dialect.tell(Closed(end)):
                    if isinstance(frame, dict):
                        wire.send(frame)
                await wire.close(POLICY_VIOLATION)
                return
            call = Call(self.placement, self.sessions, self.config)
            await self._hold(wire, call, dialect)

    async def _hold(self, wire: Wire, call: Call, dialect: Dialect) -> None:
        self._calls.add(call)
        try:
            await hold(wire, call, dialect, self.config.idle_timeout_s)
        finally:
            self._calls.discard(call)

    def _admit(self, ws: WebSocket, offered: list[str]) -> None:
        """WireError for whoever may not call, or asks for what is not here."""
        self.config.access.check(ws.client.host if ws.client else None, with_key(ws.headers, offered))
        if (mode := ws.query_params.get("mode", "audio")) != "audio":
            raise WireError("unsupported_mode", f"mode {mode[:64]!r}: this server hears audio only, mode=audio")
        model = ws.query_params.get("model") or self.config.models[0]
        if model not in self.config.models:
            raise WireError("model_not_found", f"{model[:64]!r} is not served here; see /v1/models")
