"""A typed question to an engine, beside its conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from a2t.duplex.engine import Conversation
from a2t.duplex.journal import Journal
from a2t.kv.cache import ArenaFull
from serve_apps.guest import ENGINE_FAILED
from serve_apps.messages import Failure
from serve_apps.step_loop import StepLoop


async def answer(
    loop: StepLoop, about: Conversation | Journal, question: str, dead: Callable[[], bool]
) -> str | Failure:
    """From the transcript, encoded anew on a scratch row; `dead` says whether the engine still runs."""
    try:
        asked = await asyncio.wrap_future(loop.do(lambda engine: engine.submit(about, question)))
    except ArenaFull as error:
        return Failure("busy", str(error))
    except ValueError as error:
        return Failure("invalid_question", str(error))
    while not asked.done:
        if dead():
            return ENGINE_FAILED
        await asyncio.sleep(0.01)
    return asked.answer
