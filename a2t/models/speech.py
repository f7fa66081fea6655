"""Speech decoders: what a model has said in a unit, as sound. One stream a conversation, one chunk a unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

SAMPLE_RATE = 24_000


class SpeechStream(Protocol):
    """One conversation's voice; keeps what has to last from unit to unit."""

    def say(self, ids: Sequence[int], hidden_ND: Tensor | None, text: str, end_of_turn: bool) -> np.ndarray:
        """One unit's speech, 24 kHz mono float32 [S], possibly empty.

        `ids` are the unit's response tokens (no transcript, no control tokens), `hidden_ND` their final hidden states
        (None where the model does not give them), `text` the same as text.  `end_of_turn` flushes what is held back.
        """

    def stop(self) -> None:
        """The turn was interrupted: forget what is held back."""


class SpeechDecoder(Protocol):
    """A voice that conversations share, each through its own stream."""

    def open(self) -> SpeechStream: ...


class EspeakSpeech:
    """The embedded default's voice: espeak-ng speaks the response text, unit by unit.

    `synthesize(text)` gives float32 samples at `source_rate`.  espeak-ng keeps global state, so calls must not overlap
    within a process.
    """

    def __init__(self, synthesize: Callable[[str], np.ndarray], source_rate: int):
        self._synthesize = synthesize
        self._source_rate = source_rate

    def open(self) -> EspeakStream:
        return EspeakStream(self._synthesize, self._source_rate)


class EspeakStream:
    def __init__(self, synthesize: Callable[[str], np.ndarray], source_rate: int):
        import soxr

        self._synthesize = synthesize
        self._resampler = soxr.ResampleStream(source_rate, SAMPLE_RATE, 1, dtype="float32")

    def say(self, ids: Sequence[int], hidden_ND: Tensor | None, text: str, end_of_turn: bool) -> np.ndarray:
        words = "".join(c for c in text if c.isprintable()).strip()
        pcm_S = self._synthesize(words) if words else np.zeros(0, np.float32)
        speech_S = self._resampler.resample_chunk(_eased(pcm_S), last=end_of_turn)
        if end_of_turn:
            self._resampler.clear()
        return np.asarray(speech_S, np.float32)

    def stop(self) -> None:
        self._resampler.clear()


def _eased(pcm_S: np.ndarray, samples: int = 110) -> np.ndarray:
    """Fades both ends over 5 ms, so that chunks join without a click."""
    samples = min(samples, len(pcm_S) // 2)
    if samples:
        ramp = np.linspace(0.0, 1.0, samples, dtype=np.float32)
        pcm_S = pcm_S.copy()
        pcm_S[:samples] *= ramp
        pcm_S[-samples:] *= ramp[::-1]
    return pcm_S
