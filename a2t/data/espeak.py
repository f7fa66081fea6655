"""Speech with exact word times from espeak-ng, through ctypes on the installed `espeakng-loader` package.

espeak-ng keeps global state: one engine a process, and a repeated sentence is not sample-identical within a process.
Rendering in a fixed order in a fresh process repeats exactly (facts on the embedded model).
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import numpy as np

SAMPLE_RATE = 22_050
_ONE_AT_A_TIME = threading.Lock()
_SYNCHRONOUS, _PHONEME_EVENTS, _UTF8 = 2, 1, 1
_RATE, _PITCH, _RANGE, _WORD_GAP = 1, 3, 4, 7
_WORD, _PHONEME = 1, 7


class _EventId(ctypes.Union):
    _fields_ = [("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8)]


class _Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _EventId),
    ]


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


@dataclass(frozen=True)
class Utterance:
    """`pcm_S` float32 at 22,050 Hz; word starts and ends and phonemes in seconds."""

    pcm_S: np.ndarray
    starts: list[float]
    ends: list[float]
    phonemes: list[tuple[float, str]]  # (onset, name)


class Espeak:
    """The process's engine. Make one; a second shares the same state."""

    def __init__(self) -> None:
        import espeakng_loader

        self._lib = ctypes.cdll.LoadLibrary(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        with _ONE_AT_A_TIME:
            rate = self._lib.espeak_Initialize(_SYNCHRONOUS, 0, data, _PHONEME_EVENTS)
        if rate != SAMPLE_RATE:
            raise RuntimeError(f"espeak-ng started with {rate} Hz, expected {SAMPLE_RATE}: reinstall espeakng-loader")
        self._chunks: list[np.ndarray] = []
        self._events: list[tuple[int, int, int, bytes]] = []
        self._callback = _Callback(self._collect)  # kept alive while it speaks: the library holds a bare pointer

    def _collect(self, wav: ctypes._Pointer, samples: int, event: ctypes._Pointer) -> int:
        if wav and samples > 0:
            self._chunks.append(np.ctypeslib.as_array(wav, (samples,)).copy())
        i = 0
        while event[i].type != 0:
            e = event[i]
            if e.type in (_WORD, _PHONEME):
                self._events.append((e.type, e.text_position, e.sample, e.id.string if e.type == _PHONEME else b""))
            i += 1
        return 0

    def say(
        self,
        text: str,
        voice: str = "en-us",
        rate: int = 175,
        pitch: int = 50,
        pitch_range: int = 50,
        word_gap: int = 0,
    ) -> Utterance:
        """Raises ValueError for a voice that espeak-ng does not have."""
        with _ONE_AT_A_TIME:  # the library's state and callback are the process's, whoever speaks
            self._lib.espeak_SetSynthCallback(self._callback)
            if self._lib.espeak_SetVoiceByName(voice.encode()) != 0:
                raise ValueError(f"espeak-ng has no voice {voice!r}; try en-us, en-gb-x-rp or en-us+f2")
            for parameter, value in ((_RATE, rate), (_PITCH, pitch), (_RANGE, pitch_range), (_WORD_GAP, word_gap)):
                self._lib.espeak_SetParameter(parameter, value, 0)
            self._chunks.clear()
            self._events.clear()
            data = text.encode() + b"\0"
            self._lib.espeak_Synth(data, len(data), 0, 1, 0, _UTF8, None, None)
            self._lib.espeak_Synchronize()
            pcm = np.concatenate(self._chunks) if self._chunks else np.zeros(0, np.int16)
        starts, ends = self._word_times(text.split(), len(pcm))
        phonemes = [(s / SAMPLE_RATE, n.decode(errors="replace")) for t, _, s, n in self._events if t == _PHONEME]
        return Utterance(pcm.astype(np.float32) / 32768, starts, ends, phonemes)

    def _word_times(self, words: list[str], samples: int) -> tuple[list[float], list[float]]:
        """A word ends at the next word's start or at the pause before it."""
        offsets = np.cumsum([0] + [len(w) + 1 for w in words[:-1]]) if words else np.zeros(0)
        start: dict[int, int] = {}
        for kind, position, sample, _ in self._events:
            if kind == _WORD:
                start.setdefault(int(np.searchsorted(offsets, position - 1, side="right")) - 1, sample)
        pauses = [s for t, _, s, name in self._events if t == _PHONEME and name.startswith(b"_")]
        onsets = sorted(start)
        starts, ends = [0.0] * len(words), [0.0] * len(words)
        for n, k in enumerate(onsets):
            last = onsets[n + 1] if n + 1 < len(onsets) else len(words)
            following = start[last] if last < len(words) else samples
            end = min((p for p in pauses if start[k] < p <= following), default=following)
            # espeak-ng speaks some pairs ("in the") as one word: share its time by letters
            letters = np.cumsum([0] + [len(w) for w in words[k:last]])
            edges = start[k] + (end - start[k]) * letters / letters[-1]
            for j in range(k, last):
                starts[j], ends[j] = float(edges[j - k]) / SAMPLE_RATE, float(edges[j - k + 1]) / SAMPLE_RATE
        return starts, ends
