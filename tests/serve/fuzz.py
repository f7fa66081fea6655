"""Frames as no client should send them: valid ones, bent. Seeded."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from openbmb_realtime.protocol import build_input_append, build_session_close, build_session_init
from openbmb_realtime.types import RealtimeConfig, RealtimeConnectOptions

ODD: list[Any] = [None, True, False, 0, -1, 1e308, "", "x", "\ud800", "w1 w2", [], [[]], {}, {"type": "input.append"}]
KEYS = "type input audio force_listen payload config system_prompt reason max_kv_tokens temperature text id".split()


def valid(rng: Random) -> str:
    samples = rng.choice([0, 1, 160, 800])
    pcm = np.random.default_rng(rng.randrange(2**32)).standard_normal(samples).astype("<f4")
    config = RealtimeConfig(max_kv_tokens=rng.choice([None, 0, 60]), temperature=rng.choice([None, 0.0, 0.7, 1e-38]))
    return rng.choice(
        [
            lambda: build_input_append(base64.b64encode(pcm.tobytes()).decode(), force_listen=rng.random() < 0.2),
            lambda: build_session_init(RealtimeConnectOptions("m", rng.choice(["", "w1 w2"]), config)),
            lambda: build_session_close(rng.choice(["", "bye"])),
            lambda: json.dumps({"type": "input.text", "text": rng.choice(["w1", "", "no such word"])}),
            lambda: json.dumps({"type": "input.question", "text": "w1 w2", "id": "q"}),
        ]
    )()


def bent(rng: Random) -> str | bytes:
    """A valid frame with something done to it."""
    bends: list[Callable[[Random, str], str | bytes]] = [_cut, _flip, _swap, _insert, _odd, _double, _garbage]
    return rng.choice(bends)(rng, valid(rng))


def _cut(rng: Random, frame: str) -> str:
    return frame[: rng.randrange(len(frame))]


def _flip(rng: Random, frame: str) -> bytes:
    raw = bytearray(frame.encode())
    for _ in range(rng.choice([1, 1, 2, 8])):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def _swap(rng: Random, frame: str) -> str:
    a, b = sorted(rng.randrange(len(frame)) for _ in range(2))
    return frame[:a] + frame[b:] + frame[a:b]


def _insert(rng: Random, frame: str) -> str:
    at = rng.randrange(len(frame))
    return frame[:at] + rng.choice(['"', "{", "}", "\\u0000", "\0", "NaN", "[" * 50, "é", "\\", ","]) + frame[at:]


def _odd(rng: Random, frame: str) -> str:
    """One value becomes another kind of thing, or a key moves."""
    event = json.loads(frame)
    where = event
    while True:
        key = rng.choice(list(where) or ["x"])
        if isinstance(where.get(key), dict) and where[key] and rng.random() < 0.7:
            where = where[key]
            continue
        where[rng.choice([key, rng.choice(KEYS)])] = rng.choice(ODD)
        return json.dumps(event)


def _double(rng: Random, frame: str) -> str:
    return frame + frame


def _garbage(rng: Random, frame: str) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 7, 300]))
