"""The endpoint: a Serve ingress with the realtime websocket and the REST views.

A socket only translates: `realtime` knows the dialect, placement the rows, the session actor the conversation.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse
from ray import serve
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_apps.access import Access
from serve_apps.messages import Batch, Failure, SessionEnd, SessionOptions, Ticket, View
from serve_apps.realtime import (
    SUBPROTOCOL,
    AudioAppend,
    ClientEvent,
    Dialect,
    Event,
    SessionClose,
    WireError,
    encode,
    parse_client_event,
)
from serve_apps.session_actor import Limits, SessionActor, actor_name

log = logging.getLogger("ray.serve")
Session = ray.remote(SessionActor)
POLICY_VIOLATION, INTERNAL_ERROR, NORMAL = 1008, 1011, 1000


@dataclass(frozen=True)
class GatewayConfig:
    models: tuple[str, ...]
    namespace: str  # of the engines' and sessions' actors
    access: Access = field(default_factory=Access)
    limits: Limits = field(default_factory=Limits)
    init_timeout_s: float = 30.0
    idle_timeout_s: float = 1800.0  # a pause sends nothing, so this is the longest pause
    inbox: int = 64  # frames parsed ahead of the session actor


class Hangup(Exception):
    """The client's side of the socket is gone."""


@dataclass
class Call:
    """One socket, from its handshake to its close."""

    ws: WebSocket
    id: str
    dialect: Dialect
    placement: Any
    config: GatewayConfig
    session: Any = None
    _end: SessionEnd = field(default_factory=lambda: SessionEnd("client_gone"))  # unless more is known
    _inbox: asyncio.Queue[ClientEvent | WireError | Hangup] = field(init=False)

    def __post_init__(self) -> None:
        self._inbox = asyncio.Queue(self.config.inbox)

    async def run(self) -> None:
        reader = asyncio.create_task(self._read())
        code = NORMAL
        try:
            ticket = await self._admitted()
            await self._opened(ticket)
            code = await self._converse()
        except Hangup:
            pass
        except WireError as error:
            code = POLICY_VIOLATION
            await self._fail(Failure(error.code, error.message))
        except RayActorError:
            code = INTERNAL_ERROR
            await self._fail(Failure("session_lost", "the process of this conversation is gone; call again"))
        except Exception:
            log.exception("session %s failed", self.id)
            code = INTERNAL_ERROR
            await self._fail(Failure("internal_error", "this conversation failed; the server's log says why"))
        finally:
            reader.cancel()
            # a task of its own: this one may be cancelled at any await once the client is gone
            await asyncio.shield(asyncio.create_task(self._hang_up(code)))

    async def _fail(self, failure: Failure) -> None:
        self._end = SessionEnd(failure.code, failure)
        with suppress(Hangup):
            await self._send(self.dialect.error(failure))

    async def _read(self) -> None:
        """Parses frames into the inbox, which is bounded."""
        while True:
            try:
                message = await self.ws.receive()
            except (RuntimeError, WebSocketDisconnect):
                message = {"type": "websocket.disconnect"}
            if message["type"] == "websocket.disconnect":
                await self._inbox.put(Hangup())
                return
            text, data = message.get("text"), message.get("bytes")
            try:
                event = parse_client_event(text if text is not None else data or b"")
            except WireError as error:
                await self._inbox.put(error)
                return
            await self._inbox.put(event)

    async def _next(self, timeout: float | None = None) -> ClientEvent:
        item = await asyncio.wait_for(self._inbox.get(), timeout)
        if isinstance(item, Exception):
            raise item
        return item

    async def _send(self, event: Event) -> None:
        try:
            await self.ws.send_text(encode(event))
        except (RuntimeError, WebSocketDisconnect) as error:  # starlette's words for a closed socket
            raise Hangup from error

    async def _admitted(self) -> Ticket:
        """Waits for a row, telling the client its place in the line. The client has nothing to say meanwhile."""
        ticket: Ticket = await self.placement.enter.remote(self.id)
        while ticket.engine is None:
            await self._send(self.dialect.queued(ticket))
            news = asyncio.ensure_future(self._wait_in_line(ticket.position))
            said = asyncio.ensure_future(self._next())
            await asyncio.wait({news, said}, return_when=asyncio.FIRST_COMPLETED)
            if said.done():
                news.cancel()
                if isinstance(said.result(), SessionClose):
                    raise Hangup
                raise WireError("not_admitted", "wait for session.queue_done before sending anything")
            said.cancel()
            ticket = await news
        await self._send(self.dialect.queue_done())
        return ticket

    async def _wait_in_line(self, seen: int) -> Ticket:
        while True:
            ticket: Ticket = await self.placement.wait.remote(self.id, seen, 5.0)
            if ticket.engine is not None or ticket.position != seen:
                return ticket

    async def _opened(self, ticket: Ticket) -> None:
        """Takes the client's settings and starts the session's actor beside its engine."""
        timeout = self.config.init_timeout_s
        try:
            options = await self._next(timeout)
        except TimeoutError:
            raise WireError("init_timeout", f"no session.init within {timeout:.0f} s of session.queue_done") from None
        if isinstance(options, SessionClose):
            raise Hangup
        if not isinstance(options, SessionOptions):
            raise WireError("session_not_initialized", "send session.init before any input")
        self.session = await asyncio.to_thread(self._start_actor, ticket)
        settings: Event | Failure = await self.session.start.remote(options)
        if isinstance(settings, Failure):
            raise WireError(settings.code, settings.message)
        await self._send(self.dialect.created(settings))

    def _start_actor(self, ticket: Ticket) -> Any:
        assert ticket.engine is not None
        engine = ray.get_actor(ticket.engine, namespace=self.config.namespace)
        options: dict[str, Any] = {}
        if ticket.node:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(ticket.node, soft=True)
        return Session.options(
            name=actor_name(self.id),
            namespace=self.config.namespace,
            lifetime="detached",
            num_cpus=0,
            **options,
        ).remote(self.id, engine, ticket.engine, self.config.limits)

    async def _converse(self) -> int:
        """Carries both directions until the session ends; the close code to use."""
        listen = asyncio.create_task(self._carry_in())
        speak = asyncio.create_task(self._carry_out())
        try:
            await asyncio.wait({listen, speak}, return_when=asyncio.FIRST_COMPLETED)
            if listen.done():
                await listen  # raises what the client did wrong
            return await speak
        finally:
            listen.cancel()
            speak.cancel()

    async def _carry_in(self) -> None:
        number = 0
        while True:
            try:
                event = await self._next(self.config.idle_timeout_s)
            except TimeoutError:
                event = SessionClose("idle_timeout")
            if isinstance(event, SessionClose):
                await self.session.finish.remote(event.reason)
                return
            if isinstance(event, SessionOptions):
                raise WireError("already_initialized", "session.init comes once; for other settings open a session")
            assert isinstance(event, AudioAppend)
            number += 1
            await self.session.append.remote(number, event.pcm_S, event.force_listen)

    async def _carry_out(self) -> int:
        after = -1
        while True:
            batch: Batch = await self.session.events.remote(after, 10.0)
            for report in batch.reports:
                for event in self.dialect.unit(report):
                    await self._send(event)
                after = report.unit
            if batch.end is not None:
                await self._send(self.dialect.end(batch.end))
                return NORMAL if batch.end.failure is None else INTERNAL_ERROR

    async def _hang_up(self, code: int) -> None:
        record: View | None = None
        if self.session is not None:
            with suppress(RayActorError):
                record = await self.session.finish.remote(self._end.reason, self._end.failure)
        await self.placement.leave.remote(self.id, record)
        if self.session is not None:
            ray.kill(self.session)
        with suppress(RuntimeError, WebSocketDisconnect):
            await self.ws.close(code)


api = FastAPI(title="a2t", docs_url=None, redoc_url=None)


@serve.deployment(name="gateway", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
@serve.ingress(api)
class Gateway:
    def __init__(self, placement: Any, config: GatewayConfig):
        self.placement, self.config = placement, config

    @api.websocket("/v1/realtime")
    async def realtime(self, ws: WebSocket) -> None:
        offered = ws.headers.get("sec-websocket-protocol", "")
        chosen = SUBPROTOCOL if SUBPROTOCOL in [p.strip() for p in offered.split(",")] else None
        await ws.accept(subprotocol=chosen)
        model = ws.query_params.get("model") or self.config.models[0]
        session_id = f"sess_{uuid.uuid4().hex}"
        dialect = Dialect(session_id, model)
        try:
            self.config.access.check(ws.client.host if ws.client else None, ws.headers)
            if (mode := ws.query_params.get("mode", "audio")) != "audio":
                raise WireError("unsupported_mode", f"mode {mode[:64]!r}: this server hears audio only, mode=audio")
            if model not in self.config.models:
                raise WireError("model_not_found", f"{model[:64]!r} is not served here; see /v1/models")
        except WireError as refusal:
            await ws.send_text(encode(dialect.error(refusal)))
            await ws.close(POLICY_VIOLATION)
            return
        await Call(ws, session_id, dialect, self.placement, self.config).run()

    @api.get("/healthz")
    async def healthz(self) -> JSONResponse:
        loads = await self.placement.loads.remote()
        engines = [{"name": e.name, "rows": e.rows, "free": e.rows_free, "unit_ms": round(e.unit_ms, 2)} for e in loads]
        ok = bool(engines)
        return JSONResponse({"status": "ok" if ok else "no engine", "engines": engines}, 200 if ok else 503)

    @api.get("/v1/models")
    async def models(self, request: Request) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        data = [{"id": name, "object": "model", "owned_by": "a2t"} for name in self.config.models]
        return JSONResponse({"object": "list", "data": data})

    @api.get("/v1/sessions")
    async def sessions(self, request: Request) -> JSONResponse:
        """Waiting, live and recently closed sessions, without their transcripts."""
        if refusal := self._refusal(request):
            return refusal
        directory = await self.placement.directory.remote()
        live = await asyncio.gather(*(self._view(s, directory) for s in directory["placed"]))
        views = [*directory["queued"], *live, *directory["records"]]
        return JSONResponse({"data": [{k: v for k, v in view.items() if k != "transcript"} for view in views if view]})

    @api.get("/v1/sessions/{session_id}")
    async def session(self, session_id: str, request: Request) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        view = await self._view(session_id, await self.placement.directory.remote())
        if view is not None and "units" not in view:  # it may just have closed
            view = await self._view(session_id, await self.placement.directory.remote())
        if view is None:
            return _problem(404, "session_not_found", f"no session {session_id[:64]!r} is known here")
        return JSONResponse(view)

    async def _view(self, session_id: str, directory: dict[str, Any]) -> View | None:
        if session_id in directory["placed"]:
            try:
                actor = await asyncio.to_thread(ray.get_actor, actor_name(session_id), namespace=self.config.namespace)
                return await asyncio.wait_for(actor.view.remote(), 5.0)
            except (ValueError, RayActorError, TimeoutError):  # not started yet, gone, or stuck
                return {"id": session_id, "state": "live", "engine": directory["placed"][session_id]}
        known = [*directory["queued"], *directory["records"]]
        return next((v for v in known if v["id"] == session_id), None)

    def _refusal(self, request: Request) -> JSONResponse | None:
        try:
            self.config.access.check(request.client.host if request.client else None, request.headers)
        except WireError as refusal:
            return _problem(401, refusal.code, refusal.message)
        return None


def _problem(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status)
