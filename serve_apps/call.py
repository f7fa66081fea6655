"""One client's side of a conversation, whatever dialect it speaks: commands in, events out.

`Call` finds the row, starts the session's actor or takes one up again, and asks it for
news. Placement knows the rows, the session actor the conversation.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from ray.exceptions import RayActorError

from serve_apps.access import Access
from serve_apps.events import (
    Admitted,
    Answered,
    Ask,
    Close,
    Closed,
    Command,
    Enter,
    Event,
    Hear,
    Interrupt,
    Open,
    Opened,
    Queued,
    Read,
    Reply,
    Resume,
    StateChanged,
    Turns,
)
from serve_apps.limits import Traffic, WireError
from serve_apps.messages import SILENCE, Attached, Batch, Failure, SessionEnd, SessionOptions, Ticket, View

log = logging.getLogger("ray.serve")
LEAVE_S = 10.0
"""How long placement is waited for at the end: there is none any more where the application is being deleted."""


@dataclass(frozen=True)
class GatewayConfig:
    models: tuple[str, ...]
    access: Access = field(default_factory=Access)
    traffic: Traffic = field(default_factory=Traffic)
    init_timeout_s: float = 30.0
    idle_timeout_s: float = 1800.0  # a pause sends nothing, so this is the longest pause
    questions_per_s: float = 10.0  # by REST, of all clients together
    resume_grace_s: float = 20.0  # a client that lost its socket keeps its conversation, and its row, so long


class Sessions(Protocol):
    """How session actors are started, found by their session's id, and ended."""

    async def start(self, session_id: str, ticket: Ticket) -> Any: ...

    async def find(self, session_id: str) -> Any | None: ...

    def end(self, session: Any) -> None: ...


class Call:
    """Commands (`enter`, `open`, `hear` ...) return at once or when the session has taken them; `events` tells what
    comes of them, from `Queued` to `Closed`. Both raise WireError for what the client may not do."""

    def __init__(self, placement: Any, sessions: Sessions, config: GatewayConfig):
        self.id = f"sess_{uuid.uuid4().hex}"
        self.session: Any = None
        self._placement, self._sessions, self._config = placement, sessions, config
        self._token = secrets.token_urlsafe(16)
        self._ticket: Ticket | None = None
        self._entered = False
        self._inputs = 0
        self._reader = 1
        self._opened: asyncio.Future[Opened] = asyncio.get_running_loop().create_future()
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue(64)  # full: the session keeps what follows
        self._tasks: set[asyncio.Task[None]] = set()
        self._queueing: asyncio.Future[Ticket] | None = None  # these two are never cut short: what they take would
        self._opening: asyncio.Task[None] | None = None  # not be known

    # -- commands ----------------------------------------------------------------------------------------------------

    async def obey(self, command: Command) -> None:
        match command:
            case Enter(options):
                self.enter(options)
            case Open(options):
                await self.open(options)
            case Resume():
                await self.resume(command)
            case Hear(pcm_S, force_listen):
                await self.hear(pcm_S, force_listen)
            case Interrupt():
                await self.interrupt()
            case Read(text):
                await self.read(text)
            case Ask():
                await self.ask(command)
            case Close(reason):
                await self.close(reason)
            case Reply():
                raise AssertionError("a reply is the dialect's own")

    def enter(self, options: SessionOptions | None = None) -> None:
        """Joins the waiting line, if it is not there; the row it gets is kept until it opens, by itself with `options`
        if nobody does."""
        self._begin(self._admission(options))

    async def enter_at_once(self) -> bool:
        """Before `enter`, for who will not wait in line: whether there is a row."""
        ticket = await self._ask_for_row()
        if ticket.engine is None:
            await self._placement.leave.remote(self.id, None)
        return ticket.engine is not None

    async def open(self, options: SessionOptions) -> None:
        """Starts the conversation on the row that is kept for it."""
        ticket = await self._row()
        if self._opening is not None and options.best_effort:  # it may have opened by itself meanwhile
            await asyncio.shield(self._opening)
            return
        if self._opening is not None:
            raise WireError("already_initialized", "the settings come once; for others open a session")
        self._opening = asyncio.create_task(self._start_session(options, ticket))
        await asyncio.shield(self._opening)

    async def resume(self, command: Resume) -> None:
        """Takes up a conversation whose socket was lost, or replaces its socket."""
        if self._entered:
            raise WireError("already_initialized", "one conversation a socket; for another one open another socket")
        session = await self._sessions.find(command.session_id)
        if session is None:
            raise WireError("session_not_found", f"no live session {command.session_id[:64]!r}; open another one")
        attached: Attached | Failure = await session.attach.remote(command.token, command.after)
        if isinstance(attached, Failure):
            raise WireError(attached.code, attached.message)
        self.id, self.session, self._token = command.session_id, session, command.token
        self._reader, self._inputs = attached.reader, attached.appends
        self._opened.set_result(Opened(self.id, attached.settings, self._token, True, attached.used))
        self._begin(self._follow(command.after))

    async def hear(self, pcm_S: Any, force_listen: bool = False) -> None:
        """16 kHz mono float32 samples, any number of them."""
        session = await self._live()
        self._inputs += 1
        await session.append.remote(self._inputs, pcm_S, force_listen, self._reader)

    async def interrupt(self) -> None:
        await self.hear(SILENCE, force_listen=True)

    async def read(self, text: str) -> None:
        """Typed text, before the model as if it had been said."""
        session = await self._live()
        self._inputs += 1
        await session.read.remote(self._inputs, text, self._reader)

    async def ask(self, question: Ask) -> None:
        """A typed question about the conversation; `Answered` comes when it has been."""

        async def put() -> None:
            answer: str | Failure = await session.query.remote(question.text)
            if isinstance(answer, Failure):
                await self._events.put(Answered(question, failure=answer))
            else:
                await self._events.put(Answered(question, answer))

        session = await self._live()
        self._start(put())

    async def close(self, reason: str, failure: Failure | None = None) -> None:
        """Ends the conversation; `Closed` follows."""
        if self.session is None:
            await self._events.put(Closed(SessionEnd(reason, failure)))
        else:
            await self.session.finish.remote(reason, failure)

    # -- what comes of them ------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Closed):
                return

    async def leave(self, end: SessionEnd | None) -> None:
        """Gives everything back. `end`: why the conversation is over; None: the client is gone, and may come back."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(t for t in (self._queueing, self._opening) if t), return_exceptions=True)
        record: View | None = None
        if self.session is not None:
            if end is not None and end.reason == "replaced":
                return  # another socket has it
            try:
                if end is None and self._opened.done():
                    record = await self.session.detach.remote(self._reader, self._config.resume_grace_s)
                    if record is None:
                        return
                else:
                    end = end or SessionEnd("client_gone")
                    record = await self.session.finish.remote(end.reason, end.failure)
            except RayActorError:
                log.warning("session %s: its process is gone", self.id)
        try:
            if self._entered or self._queueing is not None or self.session is not None:
                await asyncio.wait_for(self._placement.leave.remote(self.id, record), LEAVE_S)
        except (RayActorError, TimeoutError):  # gone for a moment or for good; what is held it reads from the engines
            log.warning("session %s: placement could not be told of its end", self.id)
        finally:
            if self.session is not None:
                self._sessions.end(self.session)

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _live(self) -> Any:
        if not self._opened.done():
            await self._row()
            raise WireError("session_not_initialized", "start the session before any input")
        return self.session

    async def _row(self) -> Ticket:
        """The one that is kept for it. WireError while it waits in line."""
        if self._ticket is None and self._queueing is not None:
            ticket = await asyncio.shield(self._queueing)
            self._ticket = ticket if ticket.engine is not None else None
        if self._ticket is None:
            raise WireError("not_admitted", "wait until a row is free before sending anything")
        return self._ticket

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        if self._entered:
            work.close()
            raise WireError("already_initialized", "one conversation a socket; for another one open another socket")
        self._entered = True
        self._start(work)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        async def watched() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 -- `events` raises it
                await self._events.put(error)

        task = asyncio.create_task(watched())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_for_row(self) -> Ticket:
        if self._queueing is None:
            self._queueing = asyncio.ensure_future(self._enter())
        return await asyncio.shield(self._queueing)

    async def _admission(self, default: SessionOptions | None) -> None:
        """The way of a new conversation: the line, the settings, the units."""
        ticket = await self._ask_for_row()
        while ticket.engine is None:
            await self._events.put(Queued(ticket))
            ticket = await self._wait_in_line(ticket.position)
        self._ticket = ticket
        await self._events.put(Admitted(self.id, self._token))
        timeout = self._config.init_timeout_s
        try:
            await asyncio.wait_for(asyncio.shield(self._opened), timeout)
        except TimeoutError:
            if self._opening is None:  # else it was asked for, and the session's process is slow to start
                if default is None:
                    message = f"nothing was asked for within {timeout:.0f} s of admission"
                    raise WireError("init_timeout", message) from None
                await self.open(default)
            await self._opened
        await self._follow(-1)

    async def _enter(self) -> Ticket:
        while True:
            try:
                ticket: Ticket = await self._placement.enter.remote(self.id)
                return ticket
            except RayActorError:
                await self._placement_lost()

    async def _placement_lost(self) -> None:
        log.warning("session %s: placement is gone; the line forms anew", self.id)
        await asyncio.sleep(0.25)

    async def _start_session(self, options: SessionOptions, ticket: Ticket) -> None:
        self.session = await self._sessions.start(self.id, ticket)
        settings: dict[str, Any] | Failure = await self.session.start.remote(options, self._token)
        if isinstance(settings, Failure):
            raise WireError(settings.code, settings.message)
        self._opened.set_result(Opened(self.id, settings, self._token))

    async def _wait_in_line(self, seen: int) -> Ticket:
        while True:
            try:
                ticket: Ticket = await self._placement.wait.remote(self.id, seen, 5.0)
            except RayActorError:
                await self._placement_lost()
                continue
            if ticket.engine is None and ticket.position == 0:
                raise WireError("session_deleted", "this session was taken out of the waiting line")
            if ticket.engine is not None or ticket.position != seen:
                return ticket

    async def _follow(self, after: int) -> None:
        await self._events.put(self._opened.result())
        turns, state = Turns(), "live"
        while True:
            batch: Batch = await self.session.events.remote(after, 10.0, self._reader)
            for report in batch.reports:
                for event in turns.events(report):
                    await self._events.put(event)
                after = report.unit
            if batch.end is not None:
                await self._events.put(Closed(batch.end))
                return
            if batch.state != state:
                state = batch.state
                await self._events.put(StateChanged(state))
