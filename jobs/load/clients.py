"""Real clients at real sockets: each speaks at its pace and notes when every unit comes back."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from openbmb_realtime import ErrorEvent, RealtimeClient, RealtimeConfig, RealtimeError, SessionClosed

from jobs.demo.call import CONNECT_S, RATE, STALLED_S, Tap, Trouble

FRAMES_PER_S = 4
AHEAD = 2
"""Seconds under way before results come back, where it goes as fast as they do."""
MEMORY_EVERY_S = 15.0
KEY = os.environ.get("A2T_API_KEY", "none-needed-here")


@dataclass
class Talk:
    """One client's conversation. `units`: its `a2t.unit` events; `latency_ms`: from the last sample of a unit leaving
    the client to its event."""

    session_id: str = ""
    units: list[dict[str, Any]] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)  # of its session actor, as it went
    states: set[str] = field(default_factory=set)
    trouble: str | None = None
    seconds: float = 0.0


async def converse_all(
    address: str, args: argparse.Namespace, pcm_S: np.ndarray, say: Callable[[str], None]
) -> list[Talk]:
    """All clients at once; one that fails is told of in its Talk and leaves the others alone."""
    seconds = round(args.minutes * 60)
    talks = [Talk() for _ in range(args.clients)]

    async def one(n: int) -> None:
        start = n * len(pcm_S) // args.clients
        samples_S = np.resize(np.roll(pcm_S, -start), seconds * RATE)
        try:
            await converse(address, args.name, samples_S, args.budget, args.realtime, talks[n])
        except Trouble as trouble:
            talks[n].trouble = str(trouble)
            say(f"load: client {n}: {trouble}")

    async def tell() -> None:
        while True:
            await asyncio.sleep(30)
            done = sum(len(t.units) for t in talks)
            missed = sum(u["missed"] for t in talks for u in t.units)
            say(f"load: {done} of {seconds * len(talks)} units, {missed} over their second")

    watching = [asyncio.create_task(tell()), asyncio.create_task(_watch_memory(address, talks))]
    try:
        await asyncio.gather(*(one(n) for n in range(args.clients)))
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    return talks


async def converse(address: str, model: str, pcm_S: np.ndarray, budget: int, realtime: bool, talk: Talk) -> None:
    """One conversation of whole seconds. Raises Trouble."""
    seconds = len(pcm_S) // RATE
    sent_at: list[float] = []
    news = asyncio.Event()

    def read_along(event: dict[str, Any]) -> None:
        if event["type"] == "a2t.unit":
            talk.units.append(event)
            if event["unit"] < len(sent_at):
                talk.latency_ms.append(1000 * (time.perf_counter() - sent_at[event["unit"]]))
            news.set()
        elif event["type"] == "a2t.state":
            talk.states.add(event["state"])

    async def listen() -> None:
        async for event in session:
            if isinstance(event, ErrorEvent):
                raise Trouble(f"the server ended the conversation: {event.code}: {event.message}")
            if isinstance(event, SessionClosed):
                raise Trouble(f"the conversation was closed after {len(talk.units)} of {seconds} units")

    async def speak() -> None:
        start = time.perf_counter()
        for n, frame_S in enumerate(pcm_S.reshape(seconds * FRAMES_PER_S, RATE // FRAMES_PER_S)):
            if realtime:  # a frame leaves when its last sample has been spoken
                await asyncio.sleep(start + (n + 1) / FRAMES_PER_S - time.perf_counter())
            while not realtime and len(sent_at) - len(talk.units) > AHEAD:
                await unit()
            await session.send_audio(frame_S.tobytes())
            if n % FRAMES_PER_S == FRAMES_PER_S - 1:
                sent_at.append(time.perf_counter())
        while len(talk.units) < seconds:
            await unit()

    async def unit() -> None:
        news.clear()
        try:
            await asyncio.wait_for(news.wait(), STALLED_S)
        except TimeoutError:
            raise Trouble(f"nothing came back for {STALLED_S:.0f} s after unit {len(talk.units)}") from None

    async with connected(address, model, budget, read_along) as session:
        talk.session_id = session.id
        start = time.perf_counter()
        tasks = [asyncio.create_task(speak()), asyncio.create_task(listen())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            talk.seconds = time.perf_counter() - start
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def connected(
    address: str, model: str, budget: int, on_event: Callable[[dict[str, Any]], None] = lambda event: None
) -> AsyncIterator[Any]:
    """A session of the stock client, closed at the end. `on_event` reads along. Raises Trouble."""
    factory = Tap(on_event).connect
    client = RealtimeClient(api_key=KEY, base_url=address, connect_timeout=CONNECT_S, websocket_factory=factory)
    try:
        session = await client.audio.connect(model=model, config=RealtimeConfig(max_kv_tokens=budget))
    except RealtimeError as error:
        raise Trouble(f"{address} did not take the call: {error.code}: {error.message}") from error
    try:
        yield session
    finally:
        await session.close()


async def _watch_memory(address: str, talks: list[Talk]) -> None:
    """What the server says of each session's process, now and then."""
    async with httpx.AsyncClient(base_url=address, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as http:
        while True:
            await asyncio.sleep(MEMORY_EVERY_S / 5 if not any(t.host_bytes for t in talks) else MEMORY_EVERY_S)
            try:
                views = {view["id"]: view for view in (await http.get("/v1/sessions")).json()["data"]}
            except httpx.TransportError:
                continue  # a busy moment; it is asked again
            for talk in talks:
                if bytes_now := views.get(talk.session_id, {}).get("memory", {}).get("host_uss_bytes"):
                    talk.host_bytes.append(bytes_now)
