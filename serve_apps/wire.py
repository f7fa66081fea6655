"""One websocket with bounded queues both ways. It knows no dialect and no conversation."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from contextlib import suppress
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect

from serve_apps.events import Frame
from serve_apps.limits import MAX_FRAME_CHARS, Bucket, Traffic, WireError

NORMAL, GOING_AWAY, POLICY_VIOLATION, INTERNAL_ERROR = 1000, 1001, 1008, 1011
GONE = (RuntimeError, WebSocketDisconnect, OSError)  # a closed socket in starlette's, uvicorn's and asyncio's words


class Hangup(Exception):
    """The client's side of the socket is gone."""


class Wire:
    """Frames in by `receive`, out by `send`; neither waits for a client that floods or does not read: it is refused
    with a WireError. `async with` starts and ends what it runs."""

    def __init__(self, ws: WebSocket, traffic: Traffic):
        self._ws, self._traffic = ws, traffic
        self._inbox: asyncio.Queue[str | bytes] = asyncio.Queue(traffic.inbox_frames)
        self._outbox: deque[str] = deque()
        self._outbox_bytes = 0
        self._sending_since: float | None = None  # of the frame that is being sent
        self._something = asyncio.Event()
        self._ended: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )  # set when nothing comes any more
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Wire:
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ended.done():
            self._ended.exception()  # seen, even if nobody waited for it

    async def receive(self, timeout: float | None = None) -> str | bytes:
        """The client's next frame. Raises Hangup, WireError, or TimeoutError after `timeout` seconds."""
        if self._inbox.empty():
            getter = asyncio.create_task(self._inbox.get())
            either: set[asyncio.Future[Any]] = {getter, self._ended}
            try:
                await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if getter.done():
                    return getter.result()
            finally:
                getter.cancel()
            if self._ended.done():
                self._ended.result()
            raise TimeoutError
        return self._inbox.get_nowait()

    def send(self, frame: Frame) -> None:
        """Queues a frame. WireError if the client does not read; a client that is gone is noticed by `receive`."""
        text = json.dumps(frame, ensure_ascii=False, allow_nan=False)
        limits, since = self._traffic, self._sending_since
        stuck = since is not None and time.monotonic() - since > limits.send_timeout_s
        full = len(self._outbox) >= limits.outbox_frames or self._outbox_bytes + len(text) > limits.outbox_bytes
        if self._outbox and (stuck or full):
            raise WireError("slow_reader", f"{len(self._outbox)} messages were not read; read faster")
        self._outbox.append(text)
        self._outbox_bytes += len(text)
        self._something.set()

    async def close(self, code: int, patience_s: float = 2.0) -> None:
        """Sends what is queued, for a client that reads it, and closes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._outbox and not self._tasks[1].done():
                    await asyncio.sleep(0.005)
        with suppress(*GONE, TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._ws.close(code)

    async def _read(self) -> None:
        frames = Bucket(self._traffic.frames_per_s, self._traffic.frames_at_once)
        volume = Bucket(self._traffic.bytes_per_s, self._traffic.bytes_at_once)
        try:
            while True:
                message = await self._ws.receive()
                if message["type"] == "websocket.disconnect":
                    raise Hangup
                text = message.get("text")
                frame: str | bytes = text if text is not None else message.get("bytes") or b""
                if len(frame) > MAX_FRAME_CHARS:
                    raise WireError("frame_too_large", f"{len(frame)} characters; the limit is {MAX_FRAME_CHARS}")
                if not (frames.take() and volume.take(len(frame))):
                    raise WireError("rate_limited", "too much at once; send audio no faster than its results come back")
                try:
                    self._inbox.put_nowait(frame)
                except asyncio.QueueFull:
                    raise WireError("rate_limited", "input comes faster than it can be taken; send it slower") from None
        except GONE:
            self._ended.set_exception(Hangup())
        except (Hangup, WireError) as end:
            self._ended.set_exception(end)

    async def _write(self) -> None:
        with suppress(*GONE):  # `receive` tells
            while True:
                while self._outbox:
                    self._sending_since = time.monotonic()
                    await self._ws.send_text(self._outbox[0])
                    self._sending_since = None
                    self._outbox_bytes -= len(self._outbox.popleft())
                self._something.clear()
                await self._something.wait()
