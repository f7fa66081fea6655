"""One conversation with a realtime endpoint, through the stock `openbmb-realtime` client."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from openbmb_realtime import ErrorEvent, RealtimeClient, RealtimeConfig, RealtimeError, UsageEvent
from openbmb_realtime.transport import default_websocket_factory

RATE = 16_000
AHEAD = 4
"""Seconds of audio under way before results come back: enough that the engine never waits for the client."""
STALLED_S = 60.0
CONNECT_S = 120.0  # a place in the line, and a process of its own on what may be a busy machine

OnUnit = Callable[[dict[str, Any]], None]


class Trouble(RuntimeError):
    """The conversation could not be held; the message is for the user."""


@dataclass
class Talk:
    """What came of it: the `a2t.unit` events, and the sound of the answers by unit (24 kHz mono float32)."""

    session_id: str = ""
    units: list[dict[str, Any]] = field(default_factory=list)
    speech: dict[int, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0  # that it took


class Tap:
    """Reads along on the client's socket: memory rides on events of ours, which the client itself skips.

    `connect` is a websocket factory, the client's own extension point.
    """

    def __init__(self, on_event: OnUnit):
        self._on_event = on_event

    async def connect(self, url: str, **options: Any) -> Any:
        self._socket: Any = await default_websocket_factory(url, **options)
        return self

    async def recv(self) -> str | bytes:
        frame: str | bytes = await self._socket.recv()
        self._on_event(json.loads(frame))
        return frame

    async def send(self, message: str) -> None:
        await self._socket.send(message)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        await self._socket.close(code, reason)


async def hold(
    address: str,
    model: str,
    pcm_S: np.ndarray,
    budget: int,
    prompt: str | None = None,
    on_unit: OnUnit = lambda e: None,
) -> Talk:
    """Speaks `pcm_S` (16 kHz mono float32) second by second, as fast as results come back. Raises Trouble.

    `on_unit` is given each `a2t.unit` event as it arrives.
    """
    talk = Talk()

    def read_along(event: dict[str, Any]) -> None:
        if event["type"] == "a2t.unit":
            talk.units.append(event)
            on_unit(event)
        elif event["type"] == "response.output_audio.delta":
            talk.speech[event["unit"]] = np.frombuffer(base64.b64decode(event["audio"]), "<f4")

    key = os.environ.get("A2T_API_KEY", "none-needed-here")
    factory = Tap(read_along).connect
    client = RealtimeClient(api_key=key, base_url=address, connect_timeout=CONNECT_S, websocket_factory=factory)
    start = time.perf_counter()
    try:
        config = RealtimeConfig(max_kv_tokens=budget)
        session = await client.audio.connect(model=model, system_prompt=prompt, config=config)
    except RealtimeError as error:
        raise Trouble(f"{address} did not take the call: {error.code}: {error.message}") from error
    talk.session_id = session.id

    seconds = -(-len(pcm_S) // RATE)
    padded_S = np.pad(np.asarray(pcm_S, np.float32), (0, RATE * seconds - len(pcm_S)))
    may_send = asyncio.Semaphore(AHEAD)
    done = 0

    async def listen() -> None:
        nonlocal done
        async for event in session:
            if isinstance(event, UsageEvent):  # one comes with each finished unit
                done += 1
                may_send.release()
            elif isinstance(event, ErrorEvent):
                raise Trouble(f"the server ended the conversation: {event.code}: {event.message}")
        raise Trouble(f"the conversation was closed after {done} of {seconds} s")

    async def speak() -> None:
        for second_S in padded_S.reshape(seconds, RATE):
            await may_send.acquire()
            await session.send_audio(second_S.tobytes())
        for _ in range(AHEAD):  # until nothing is under way
            await may_send.acquire()

    async def watch() -> None:
        before = -1
        while done != before:
            before = done
            await asyncio.sleep(STALLED_S)
        raise Trouble(f"nothing came back for {STALLED_S:.0f} s after unit {done}")

    tasks = [asyncio.create_task(c) for c in (speak(), listen(), watch())]
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            task.result()
        talk.seconds = time.perf_counter() - start
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await session.close()
    return talk
