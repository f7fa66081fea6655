"""What the stock clients' scripts share: the sound to send, at the pace of speech, and what they saw, as JSON lines.

    python tests/clients/NAME.py ws://HOST:PORT/v1/realtime SOUND.wav     (24 kHz mono, 16 bit)

Each runs in a virtual environment of its own (`make clients`): these packages and Ray want other versions of the same.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import wave
from collections.abc import AsyncIterator
from typing import Any

RATE = 24_000
PIECE_S = 0.1


def arguments() -> tuple[str, bytes]:
    url, path = sys.argv[1:]
    with wave.open(path) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (RATE, 1, 2)
        return url, sound.readframes(sound.getnframes())


def saw(kind: str, **fields: Any) -> None:
    print(json.dumps({"saw": kind, **fields}), flush=True)


async def pieces(sound: bytes) -> AsyncIterator[bytes]:
    size = int(RATE * PIECE_S) * 2
    start = time.monotonic()
    for n, i in enumerate(range(0, len(sound), size)):
        await asyncio.sleep(max(0.0, start + n * PIECE_S - time.monotonic()))
        yield sound[i : i + size]
