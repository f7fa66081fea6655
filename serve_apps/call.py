"""One socket. It only translates: `realtime` knows the dialect, placement the rows, the session actor the rest."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import WebSocket, WebSocketDisconnect
from ray.exceptions import RayActorError

from serve_apps.access import Access
from serve_apps.messages import Batch, Failure, SessionEnd, SessionOptions, Ticket, View
from serve_apps.realtime import (
    AudioAppend,
    ClientEvent,
    Dialect,
    Event,
    SessionClose,
    WireError,
    encode,
    parse_client_event,
)

log = logging.getLogger("ray.serve")
POLICY_VIOLATION, INTERNAL_ERROR, NORMAL = 1008, 1011, 1000


@dataclass(frozen=True)
class GatewayConfig:
    models: tuple[str, ...]
    access: Access = field(default_factory=Access)
    init_timeout_s: float = 30.0
    idle_timeout_s: float = 1800.0  # a pause sends nothing, so this is the longest pause
    inbox: int = 64  # frames parsed ahead of the session actor


class Sessions(Protocol):
    """How session actors are started, found by their session's id, and ended."""

    async def start(self, session_id: str, ticket: Ticket) -> Any: ...

    async def find(self, session_id: str) -> Any | None: ...

    def end(self, session: Any) -> None: ...


class Hangup(Exception):
    """The client's side of the socket is gone."""


@dataclass
class Call:
    """One socket, from its handshake to its close."""

    ws: WebSocket
    id: str
    dialect: Dialect
    placement: Any
    sessions: Sessions
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
        self.session = await self.sessions.start(self.id, ticket)
        settings: Event | Failure = await self.session.start.remote(options)
        if isinstance(settings, Failure):
            raise WireError(settings.code, settings.message)
        await self._send(self.dialect.created(settings))

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
            self.sessions.end(self.session)
        with suppress(RuntimeError, WebSocketDisconnect):
            await self.ws.close(code)
