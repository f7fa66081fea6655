"""Sound as the OpenAI realtime dialect carries it, and voice activity. No Ray, no sockets.

A client's PCM is 24 kHz, 16 bit, little-endian; telephone formats are 8 kHz, G.711. The model hears 16 kHz float32 and
speaks 24 kHz float32.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator

import numpy as np
import soxr

from serve_apps.limits import MAX_AUDIO_S, WireError
from serve_apps.messages import SAMPLE_RATE_IN, SAMPLE_RATE_OUT

RATES = {"audio/pcm": SAMPLE_RATE_OUT, "audio/pcmu": 8_000, "audio/pcma": 8_000}


class Ears:
    """What a client sends, piece by piece, as the model hears it. A piece may end within a sample."""

    def __init__(self, kind: str):
        self.kind = kind
        self._rest = b""
        self._resampler = soxr.ResampleStream(RATES[kind], SAMPLE_RATE_IN, 1, dtype="float32", quality="MQ")

    def hear(self, audio: object) -> np.ndarray:
        """Base64 in, 16 kHz float32 [S] out; S may be 0. Raises WireError for what is not audio."""
        if not isinstance(audio, str):
            raise WireError("invalid_audio", "audio must be a base64 string")
        try:
            raw = base64.b64decode(audio, validate=True)
        except (binascii.Error, ValueError):
            raise WireError("invalid_audio", "audio is not base64") from None
        width = 2 if self.kind == "audio/pcm" else 1
        if len(raw) > MAX_AUDIO_S * RATES[self.kind] * width:
            raise WireError("frame_too_large", f"more than {MAX_AUDIO_S:.0f} s of audio in one event")
        raw = self._rest + raw
        whole = len(raw) - len(raw) % width
        raw, self._rest = raw[:whole], raw[whole:]
        pcm_S = np.frombuffer(raw, "<i2") if width == 2 else DECODE[self.kind][np.frombuffer(raw, np.uint8)]
        return self._resampler.resample_chunk(pcm_S.astype(np.float32) / 32768)


def spoken(kind: str, pcm_S: np.ndarray) -> str:
    """What the model says (24 kHz float32), as base64 for a client."""
    if (rate := RATES[kind]) != SAMPLE_RATE_OUT:
        pcm_S = soxr.resample(pcm_S, SAMPLE_RATE_OUT, rate)
    pcm_S = np.clip(np.rint(pcm_S * 32767), -32768, 32767).astype("<i2")
    raw = pcm_S.tobytes() if kind == "audio/pcm" else ENCODE[kind][pcm_S.view(np.uint16)].tobytes()
    return base64.b64encode(raw).decode()


def _mu_law() -> np.ndarray:
    """16-bit value of each code, ITU-T G.711."""
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    size = (((code & 0x0F) << 3) + 0x84) << ((code & 0x70) >> 4)
    return np.where(code & 0x80, 0x84 - size, size - 0x84).astype(np.int16)


def _a_law() -> np.ndarray:
    code = np.arange(256, dtype=np.int32) ^ 0x55
    low, segment = (code & 0x0F) << 4, (code & 0x70) >> 4
    size = np.where(segment == 0, low + 8, (low + 0x108) << np.maximum(segment - 1, 0))
    return np.where(code & 0x80, size, -size).astype(np.int16)


def _nearest(values: np.ndarray) -> np.ndarray:
    """The code nearest to each 16-bit value, indexed by that value as an unsigned one."""
    order = np.argsort(values, kind="stable")
    middle = (values[order][1:].astype(np.int32) + values[order][:-1]) / 2
    wanted = np.arange(65_536, dtype=np.uint16).view(np.int16)
    return order[np.searchsorted(middle, wanted)].astype(np.uint8)


DECODE = {"audio/pcmu": _mu_law(), "audio/pcma": _a_law()}
ENCODE = {kind: _nearest(values) for kind, values in DECODE.items()}


class Voice:
    """Voice activity by loudness, against a floor that follows the quiet. It times the events that clients live by; it
    never decides what the model hears."""

    FRAME = SAMPLE_RATE_IN // 50
    LOUD = 0.006  # root mean square; a quiet voice close to a microphone
    ABOVE = 3.0  # times the floor

    def __init__(self, start_ms: int = 80, silence_ms: int = 600):
        self.start_ms, self.silence_ms = start_ms, silence_ms
        self.active = False
        self.ms = 0  # heard so far
        self._rest_S = np.zeros(0, np.float32)
        self._floor = 0.002
        self._run_ms = 0  # of frames that speak for a change

    def hear(self, pcm_S: np.ndarray) -> Iterator[int]:
        """Yields the time of each change, in ms of what was heard; `active` says which it was."""
        pcm_S = np.concatenate([self._rest_S, pcm_S])
        frames = len(pcm_S) // self.FRAME
        self._rest_S = pcm_S[frames * self.FRAME :]
        loudness_F = np.sqrt(np.square(pcm_S[: frames * self.FRAME].reshape(frames, -1)).mean(1, dtype=np.float64))
        for loudness in loudness_F.tolist():
            self.ms += 20
            loud = loudness > max(self.LOUD, self.ABOVE * self._floor)
            self._floor = max(1e-5, min(loudness, self._floor * 1.002))  # doubles in seven seconds of noise
            self._run_ms = self._run_ms + 20 if loud != self.active else 0
            if self._run_ms >= (self.silence_ms if self.active else self.start_ms):
                self.active = not self.active
                since, self._run_ms = self.ms - self._run_ms, 0
                yield since
