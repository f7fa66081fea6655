"""How much one client may send, and how far it may fall behind. No Ray, no sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_AUDIO_S = 60.0
MAX_FRAME_CHARS = int(MAX_AUDIO_S * 16_000 * 4 * 4 / 3) + 4096  # that much float32 at 16 kHz, in base64
MAX_PROMPT_CHARS = 16_384
MAX_BODY_BYTES = 65_536  # of a REST request


class WireError(ValueError):
    """A client did what it may not. `code` is stable and machine-readable; the message says what to do instead."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Traffic:
    """Of one socket. Speech in real time is 1 to 50 frames and 85 KB a second; a fast upload of a file comes to some
    hundred KB ahead of what the engine has done, and `input_overflow` is what stops it."""

    frames_per_s: float = 200.0
    frames_at_once: float = 2_000.0
    bytes_per_s: float = 4e6
    bytes_at_once: float = 16e6
    inbox_frames: int = 256  # received and not yet taken by the conversation
    outbox_frames: int = 1_024  # told and not yet taken by the client
    outbox_bytes: int = 8_000_000
    send_timeout_s: float = 20.0  # a client that takes nothing for so long does not read


class Bucket:
    """A token bucket: `rate` a second on average, `depth` at once."""

    def __init__(self, rate: float, depth: float, clock: Callable[[], float] = time.monotonic):
        self._rate, self._depth, self._clock = rate, depth, clock
        self._level, self._at = depth, clock()

    def take(self, amount: float = 1.0) -> bool:
        """Whether there was as much; takes nothing otherwise."""
        now = self._clock()
        self._level = min(self._depth, self._level + self._rate * (now - self._at))
        self._at = now
        if amount > self._level:
            return False
        self._level -= amount
        return True
