"""The socket itself, without a conversation: what a client that floods, lies, or does not read comes to."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from websockets.asyncio.client import connect

from serve_apps.limits import MAX_FRAME_CHARS, Bucket, Traffic, WireError
from serve_apps.wire import POLICY_VIOLATION, Hangup, Wire
from tests.serve.endpoint import served


@dataclass
class Seen:
    frames: list[str | bytes] = field(default_factory=list)
    end: Exception | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def wired(traffic: Traffic, talks: bool = False, takes: bool = True) -> AsyncIterator[tuple[str, Seen]]:
    """A server that takes frames (or does not), and talks without pause (or does not), until the wire refuses."""
    seen, api = Seen(), FastAPI()

    @api.websocket("/")
    async def route(ws: WebSocket) -> None:
        await ws.accept()
        async with Wire(ws, traffic) as wire:
            try:
                while True:
                    if talks:
                        wire.send({"type": "noise", "text": "x" * 50_000})
                        await asyncio.sleep(0)
                    else:
                        await asyncio.sleep(0 if takes else 3600)
                        seen.frames.append(await wire.receive())
            except (Hangup, WireError) as error:
                seen.end = error
            await wire.close(POLICY_VIOLATION, patience_s=0.2)
        seen.over.set()

    async with served(api) as address:
        yield address.replace("http", "ws"), seen


async def ended(seen: Seen) -> Any:
    async with asyncio.timeout(60):
        await seen.over.wait()
    return seen.end


def by_hand(address: str, small: bool = False) -> socket.socket:
    """A websocket of the bare kind, after its handshake."""
    host, _, port = address.removeprefix("ws://").partition(":")
    s = socket.socket()
    if small:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.connect((host, int(port)))
    key = base64.b64encode(os.urandom(16)).decode()
    s.sendall(
        f"GET / HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    s.settimeout(30)
    while not s.recv(1).endswith(b"\n"):  # the rest of the answer may stay where it is
        pass
    return s


async def test_frames_arrive_in_order_until_the_client_hangs_up() -> None:
    async with wired(Traffic()) as (address, seen):
        async with connect(address) as ws:
            for n in range(100):
                await ws.send(str(n))
        assert isinstance(await ended(seen), Hangup)
        assert seen.frames == [str(n) for n in range(100)]


async def test_a_client_that_does_not_read_is_refused_and_costs_no_more_than_its_outbox() -> None:
    traffic = Traffic(outbox_bytes=200_000)
    async with wired(traffic, talks=True) as (address, seen):
        with await asyncio.to_thread(by_hand, address, True):
            end = await ended(seen)
            assert isinstance(end, WireError)
            assert end.code == "slow_reader"


async def test_so_is_one_that_takes_nothing_for_too_long() -> None:
    traffic = Traffic(outbox_bytes=10**9, outbox_frames=10**9, send_timeout_s=0.3)
    async with wired(traffic, talks=True) as (address, seen):
        with await asyncio.to_thread(by_hand, address, True):
            assert (await ended(seen)).code == "slow_reader"


@pytest.mark.parametrize(
    "traffic",
    [
        Traffic(frames_at_once=50, frames_per_s=1),
        Traffic(bytes_at_once=5_000, bytes_per_s=1),
    ],
)
async def test_a_flood_is_refused(traffic: Traffic) -> None:
    async with wired(traffic) as (address, seen), connect(address) as ws:
        for _ in range(100):
            await ws.send("x" * 100)
        end = await ended(seen)
        assert isinstance(end, WireError)
        assert end.code == "rate_limited"
        assert 20 <= len(seen.frames) <= 50


async def test_frames_longer_than_any_speech_are_refused() -> None:
    async with wired(Traffic()) as (address, seen), connect(address) as ws:
        await ws.send("x" * (MAX_FRAME_CHARS + 1))
        assert (await ended(seen)).code == "frame_too_large"


@pytest.mark.parametrize("declared", [1_000, 2**20, 2**40, 2**63 - 1])
async def test_a_frame_that_is_not_as_long_as_it_says(declared: int) -> None:
    """The promise alone costs nothing: the socket closes, and what came before it was heard."""
    async with wired(Traffic()) as (address, seen):
        with await asyncio.to_thread(by_hand, address) as s:
            s.sendall(b"\x81\x82\0\0\0\0ok")  # masked with zeros
            async with asyncio.timeout(60):
                while not seen.frames:
                    await asyncio.sleep(0.01)
            s.sendall(b"\x81\xff" + struct.pack(">Q", declared) + b"\0\0\0\0" + b"short")
            s.shutdown(socket.SHUT_WR)
            assert isinstance(await ended(seen), Hangup)
        assert seen.frames == ["ok"]


def test_a_bucket_fills_at_its_rate() -> None:
    now = [0.0]
    bucket = Bucket(rate=10, depth=5, clock=lambda: now[0])
    assert [bucket.take() for _ in range(6)] == [True] * 5 + [False]
    now[0] = 0.25
    assert [bucket.take() for _ in range(3)] == [True, True, False]
    now[0] = 1000.0
    assert not bucket.take(6)
    assert bucket.take(5)
