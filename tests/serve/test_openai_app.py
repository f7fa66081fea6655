"""The OpenAI dialect through Ray Serve's proxy, by the unmodified openai client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI
from websockets.exceptions import InvalidStatus

from tests.serve.test_openai_endpoint import noise, until


def client(address: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{address}/v1", api_key="unused")


async def connected(address: str) -> Any:
    """Once there is a row: who has hung up gives his back a moment later."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await client(address).realtime.connect(model="any").enter()
            except InvalidStatus as refused:
                if refused.response.status_code != 503:
                    raise
                await asyncio.sleep(0.2)


async def test_one_row_two_callers(address: str) -> None:
    first = await connected(address)
    await until(first, "session.created")
    await first.session.update(session={"type": "realtime", "instructions": "no such words here"})
    await until(first, "session.updated")
    await first.input_audio_buffer.append(audio=noise(2))
    await until(first, "input_audio_buffer.speech_started")
    with pytest.raises(InvalidStatus) as caught:
        await client(address).realtime.connect(model="any").enter()
    assert caught.value.response.status_code == 503
    await first.close()
    again = await connected(address)
    await until(again, "session.created")
    await again.close()
