"""Clients that do as they should not, against all of the endpoint but Ray: each is dropped alone, leaving nothing."""

from __future__ import annotations

import asyncio
import gc
import json
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
from openbmb_realtime import ErrorEvent, UsageEvent
from openbmb_realtime.protocol import build_input_append, build_session_init
from openbmb_realtime.types import RealtimeConnectOptions
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from serve_apps import hold as holds
from serve_apps.call import Call
from serve_apps.hold import hold
from serve_apps.limits import Traffic
from serve_apps.realtime import Realtime
from serve_apps.wire import Wire
from tests.serve.endpoint import MODEL, Endpoint, endpoint
from tests.serve.fuzz import bent, valid

FRAMES = 10_000
AT_ONCE = 32
INIT = build_session_init(RealtimeConnectOptions(MODEL))


class Script:
    """A websocket of this process that sends given frames and keeps what is sent to it: 10,000 frames in seconds."""

    def __init__(self, frames: list[str | bytes]):
        self.frames, self.taken = iter(frames), 0
        self.sent: list[dict[str, Any]] = []
        self.closed: int | None = None

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.closed is not None or (frame := next(self.frames, None)) is None:
            return {"type": "websocket.disconnect"}
        self.taken += 1
        return {"type": "websocket.receive", "text" if isinstance(frame, str) else "bytes": frame}

    async def send_text(self, text: str) -> None:
        self.sent.append(json.loads(text))

    async def close(self, code: int = 1000) -> None:
        self.closed = code


class Patient(Script):
    """Waits for its place before it sends, as clients do."""

    async def receive(self) -> dict[str, Any]:
        while not any(f["type"] in ("session.queue_done", "error") for f in self.sent):
            await asyncio.sleep(0.001)
        return await super().receive()


async def test_ten_thousand_fuzzed_frames_crash_nothing_and_leave_no_row() -> None:
    rng = Random(20_26)
    async with endpoint(rows=AT_ONCE // 2, resume_grace_s=0.01) as at:
        other = await at.client().audio.connect(model=MODEL)
        taken, codes = 0, set()

        async def caller() -> None:
            nonlocal taken
            while taken < FRAMES:
                frames = [valid(rng) if rng.random() < 0.3 else bent(rng) for _ in range(12)]
                opens = rng.random() < 0.25
                script = Patient([INIT, *frames]) if opens or rng.random() < 0.2 else Script(frames)
                async with Wire(script, at.desk.config.traffic) as wire:  # type: ignore[arg-type]
                    await hold(wire, Call(at.desk.placement, at.sessions, at.desk.config), Realtime(MODEL), 60.0)
                taken += script.taken
                errors = [f["error"]["code"] for f in script.sent if f["type"] == "error"]
                assert len(errors) <= 1
                assert not errors or script.sent[-1]["type"] == "error"
                codes.update(errors)

        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
        assert taken >= FRAMES
        assert "internal_error" not in codes
        assert "session_lost" not in codes
        assert len(codes) >= 6
        await goes_on(other)
        await other.close()
        await at.empty()
        await nothing_left(at)


async def goes_on(session: Any) -> None:
    await session.send_audio(np.zeros(16_000, np.float32).tobytes())
    async with asyncio.timeout(60):
        async for event in session:
            assert not isinstance(event, ErrorEvent)
            if isinstance(event, UsageEvent):
                return


async def nothing_left(at: Endpoint) -> None:
    async with asyncio.timeout(60):
        while holds._leaving:
            await asyncio.sleep(0.01)
    health = (await at.get("/healthz")).json()
    assert [e["free"] for e in health["engines"]] == [at.host._config.rows]
    assert [s for s in (await at.get("/v1/sessions")).json()["data"] if s["state"] != "closed"] == []
    assert not at.host._loop._engine.conversations
    gc.collect()
    known = [o for o in gc.get_objects() if type(o) in (Call, Wire)]
    config = at.desk.config
    assert not [o for o in known if vars(o).get("_config") is config or vars(o).get("_traffic") is config.traffic]


async def errors(at: Endpoint, *frames: str | bytes) -> str:
    """What a real socket is told that sends this and goes on reading."""
    code = ""
    async with asyncio.timeout(60), connect(at.socket) as ws:
        with suppress(ConnectionClosed):
            while (await received(ws))["type"] != "session.queue_done":
                pass
            for frame in frames:
                await ws.send(frame)
        with suppress(ConnectionClosed):
            while True:
                event = await received(ws)
                code = event["error"]["code"] if event["type"] == "error" else code
    return code


async def received(ws: Any) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(await ws.recv())
    return event


async def test_a_flood_a_mute_and_a_hoarder_are_dropped_alone() -> None:
    traffic = Traffic(frames_at_once=200, frames_per_s=50)
    async with endpoint(rows=2, traffic=traffic, init_timeout_s=0.5) as at:
        other = await at.client().audio.connect(model=MODEL)
        assert await errors(at, INIT, *[build_input_append("")] * 1_000) == "rate_limited"
        await goes_on(other)
        assert await errors(at) == "init_timeout"
        await goes_on(other)
        minute = build_input_append(_base64(np.zeros(40 * 16_000, np.float32)))
        assert await errors(at, INIT, minute) == "input_overflow"
        await goes_on(other)
        await other.close()
        await at.empty()
        await nothing_left(at)


async def test_a_session_that_is_slow_to_start_is_not_its_client_s_fault() -> None:
    async with endpoint(rows=1, init_timeout_s=0.1) as at:
        start = at.sessions.start

        async def slowly(*args: Any) -> Any:
            await asyncio.sleep(0.5)
            return await start(*args)

        at.sessions.start = slowly  # type: ignore[method-assign]
        session = await at.client().audio.connect(model=MODEL)
        await goes_on(session)
        await session.close()
        await at.empty()


async def test_who_vanishes_without_a_word_leaves_nothing_after_the_grace() -> None:
    async with endpoint(rows=2, resume_grace_s=0.2) as at:
        for opened in (False, True) * 3:
            async with connect(at.socket) as ws:
                while (await received(ws))["type"] != "session.queue_done":
                    pass
                if opened:
                    await ws.send(INIT)
                    await received(ws)
                ws.transport.abort()  # no close frame, no goodbye
        await at.empty()
        await nothing_left(at)


async def test_a_lost_socket_s_conversation_is_taken_up_and_nothing_is_missed() -> None:
    audio = (0.1 * np.random.default_rng(1).standard_normal(8 * 16_000)).astype(np.float32)
    async with endpoint(rows=1, resume_grace_s=30.0) as at:
        ws = await connect(at.socket)
        while (await received(ws))["type"] != "session.queue_done":
            pass
        await ws.send(INIT)
        created = await received(ws)
        await ws.send(build_input_append(_base64(audio[: 5 * 16_000])))
        first: list[dict[str, Any]] = []
        while len(first) < 2:
            event = await received(ws)
            first += [event] if event["type"] == "a2t.unit" else []
        ws.transport.abort()
        address = f"{at.socket}&session={created['session_id']}"
        assert await errors_of(f"{address}&token=wrong") == "resume_refused"
        assert await errors_of(f"{at.socket}&session=sess_none&token=x") == "session_not_found"
        elsewhere = address.replace(at.address.replace("http", "ws"), at.other_address.replace("http", "ws"))
        again = await connect(f"{elsewhere}&token={created['resume_token']}&after=1")
        created_again = await received(again)
        assert (created_again["session_id"], created_again["resumed"]) == (created["session_id"], True)
        await again.send(build_input_append(_base64(audio[5 * 16_000 :])))
        rest = []
        async with asyncio.timeout(60):
            while not rest or rest[-1]["unit"] < 7:
                event = await received(again)
                rest += [event] if event["type"] == "a2t.unit" else []
        assert [u["unit"] for u in first + rest] == list(range(8))
        used = created["config"]["prefix_tokens"]
        for unit in first + rest:  # each second: what was fed but for the two marks around it
            used += unit["positions"] - 2
            assert unit["usage"]["total_tokens"] == used
        third = await connect(f"{address}&token={created['resume_token']}&after=7")  # the second still thinks it is on
        assert (await received(third))["resumed"] is True
        async with asyncio.timeout(60):
            while (event := await received(again))["type"] != "error":
                pass
        assert event["error"]["code"] == "session_replaced"
        await third.send(json.dumps({"type": "session.close"}))
        async with asyncio.timeout(60):
            while (await received(third))["type"] != "session.closed":
                pass
        await at.empty()
        assert await errors_of(f"{address}&token={created['resume_token']}") == "session_not_found"
        await again.close()
        await third.close()
        await nothing_left(at)


async def errors_of(address: str) -> str:
    async with asyncio.timeout(60), connect(address) as ws:
        event = await received(ws)
    assert event["type"] == "error"
    return str(event["error"]["code"])


async def test_sessions_opened_and_closed_leave_memory_where_it_was() -> None:
    """Objects, not bytes: what a session leaves behind would be there once for each."""
    async with endpoint(rows=4) as at:

        async def several(n: int) -> int:
            async def one() -> None:
                session = await at.client().audio.connect(model=MODEL)
                await session.close()

            for _ in range(n // 4):
                await asyncio.gather(*(one() for _ in range(4)))
            await at.empty()
            await nothing_left(at)
            return len(gc.get_objects())

        before = await several(120)  # the records that are kept are full by then
        after = await several(480)  # some 100 objects are timers that were called off and are not yet due
        assert after - before < 480, f"{(after - before) / 480:.1f} objects a session stay"


def _base64(pcm_S: np.ndarray) -> str:
    import base64

    return base64.b64encode(pcm_S.tobytes()).decode()
