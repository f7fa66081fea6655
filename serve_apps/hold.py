"""Carries frames between one socket and one call, through a dialect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from ray.exceptions import RayActorError

from serve_apps.call import Call
from serve_apps.events import Closed, Command, Dialect, Frame, Reply
from serve_apps.limits import WireError
from serve_apps.messages import Failure, SessionEnd
from serve_apps.wire import INTERNAL_ERROR, NORMAL, POLICY_VIOLATION, Hangup, Wire

log = logging.getLogger("ray.serve")


async def hold(wire: Wire, call: Call, dialect: Dialect, idle_timeout_s: float) -> None:
    """Carries one socket's conversation until either side ends it."""

    async def carry_in() -> None:
        await obey(dialect.greet())
        while True:
            try:
                frame = await wire.receive(idle_timeout_s)
            except TimeoutError:
                await call.close("idle_timeout")
                return
            await obey(dialect.receive(frame))

    async def obey(asked: Iterable[Frame | Command]) -> None:
        for command in asked:
            if isinstance(command, Reply):
                wire.send(command.frame)
            elif isinstance(command, dict):
                wire.send(command)
            else:
                await call.obey(command)

    async def carry_out() -> SessionEnd:
        async for event in call.events():
            await obey(dialect.tell(event))
            if isinstance(event, Closed):
                return event.end
        raise AssertionError("events end with Closed")

    end: SessionEnd | None = None
    code, told = NORMAL, False
    listen, speak = asyncio.create_task(carry_in()), asyncio.create_task(carry_out())
    try:
        await asyncio.wait({listen, speak}, return_when=asyncio.FIRST_COMPLETED)
        if listen.done():
            listen.result()  # raises what the client did
        end, told = await speak, True
        code = NORMAL if end.failure is None else INTERNAL_ERROR
    except Hangup:
        end = None if dialect.resumes else SessionEnd("client_gone")
    except WireError as error:
        code, end = POLICY_VIOLATION, SessionEnd(error.code, Failure(error.code, error.message))
    except RayActorError:
        message = "the process of this conversation is gone; call again"
        code, end = INTERNAL_ERROR, SessionEnd("session_lost", Failure("session_lost", message))
    except Exception:
        log.exception("session %s failed", call.id)
        message = "this conversation failed; the server's log says why"
        code, end = INTERNAL_ERROR, SessionEnd("internal_error", Failure("internal_error", message))
    finally:
        for task in (listen, speak):
            task.cancel()
        await asyncio.gather(listen, speak, return_exceptions=True)
        if end is not None and not told:
            with suppress(WireError):
                for frame in dialect.tell(Closed(end)):
                    if isinstance(frame, dict):
                        wire.send(frame)
        # tasks of their own: this one may be cancelled at any await once the client is gone
        leaving = asyncio.create_task(call.leave(end))
        _leaving.add(leaving)
        leaving.add_done_callback(_left)
        await wire.close(code)
        if end is not None:
            await asyncio.shield(leaving)


_leaving: set[asyncio.Task[None]] = set()
"""Calls whose client is gone, until they have given everything back."""


def _left(task: asyncio.Task[None]) -> None:
    _leaving.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a call did not give everything back", exc_info=error)
