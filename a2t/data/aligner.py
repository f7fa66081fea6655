"""Forced alignment of English speech with a text: pocketsphinx and the model that its package carries.

The decoder is given a little noise, since it loses its way in digital silence, and is tried again with more and with
less of it when it does not reach the end of the text.  `python -m jobs.check_aligner` says how exact it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from a2t.data.findings import Findings
from a2t.data.word_times import Interval, key

RATE = 16_000
FRAME = 0.01
PAD = 0.2
"""Seconds put before and after, in which the decoder finds its silence."""
LEVEL = 0.5
NOISES = (3e-3, 1e-2, 1e-3)
"""Of a peak of LEVEL; one try each."""

# ARPAbet for what no dictionary has: longer spellings first. Rough, and enough to hold a word's place.
_SPELLED = {
    "tion": "SH AH N", "igh": "AY", "tch": "CH", "ch": "CH", "sh": "SH", "th": "TH", "ph": "F", "wh": "W", "ck": "K",
    "ng": "NG", "qu": "K W", "oo": "UW", "ee": "IY", "ea": "IY", "ai": "EY", "ay": "EY", "oa": "OW", "ow": "AW",
    "ou": "AW", "oi": "OY", "oy": "OY", "au": "AO", "aw": "AO", "er": "ER", "ar": "AA R", "or": "AO R", "ll": "L",
    "ss": "S", "tt": "T", "pp": "P", "nn": "N", "mm": "M", "rr": "R", "dd": "D", "ff": "F", "gg": "G", "bb": "B",
    "a": "AE", "b": "B", "c": "K", "d": "D", "e": "EH", "f": "F", "g": "G", "h": "HH", "i": "IH", "j": "JH", "k": "K",
    "l": "L", "m": "M", "n": "N", "o": "AA", "p": "P", "q": "K", "r": "R", "s": "S", "t": "T", "u": "AH", "v": "V",
    "w": "W", "x": "K S", "y": "IY", "z": "Z",
    "0": "Z IH R OW", "1": "W AH N", "2": "T UW", "3": "TH R IY", "4": "F AO R", "5": "F AY V", "6": "S IH K S",
    "7": "S EH V AH N", "8": "EY T", "9": "N AY N",
}  # fmt: skip


class Aligner:
    """One decoder, for one process. The same audio and text give the same times whatever came before."""

    @cached_property
    def _decoder(self) -> Any:
        import pocketsphinx

        return pocketsphinx.Decoder(lm=None, samprate=RATE, bestpath=False, cmn="batch", loglevel="FATAL")

    def align(self, pcm_S: np.ndarray, words: Sequence[str], where: str, findings: Findings) -> list[Interval] | None:
        """Times of the words that have letters. None if no try got through, or if a word has no English letter."""
        spoken = [k for w in words if (k := key(w))]
        if not spoken or not all(self._knows(w, where, findings) for w in spoken):
            return None
        peak = float(np.abs(pcm_S).max(initial=0.0))
        if not peak:
            return None
        padded_S = np.pad(pcm_S * (LEVEL / peak), round(PAD * RATE))
        noise = np.random.default_rng(zlib.crc32(where.encode()))
        for level in NOISES:
            found = self._try(padded_S + level * noise.standard_normal(len(padded_S)), spoken)
            if len(found) == len(spoken):
                times = np.clip(np.array(found) - PAD, 0, len(pcm_S) / RATE)
                return [Interval(w, float(a), float(b)) for w, (a, b) in zip(spoken, times, strict=True)]
        return None

    def _try(self, pcm_S: np.ndarray, words: Sequence[str]) -> list[tuple[float, float]]:
        d = self._decoder
        d.reinit_feat()  # it would remember the last utterance's level
        d.set_align_text(" ".join(words))
        d.start_utt()
        d.process_raw((np.clip(pcm_S, -1, 1) * 32767).astype(np.int16).tobytes(), full_utt=True)
        d.end_utt()
        spoken = [s for s in d.seg() or () if not s.word.startswith(("<", "[", "+"))]
        return [(s.start_frame * FRAME, (s.end_frame + 1) * FRAME) for s in spoken]

    def _knows(self, word: str, where: str, findings: Findings) -> bool:
        """After this the decoder has sounds for the word, if its letters have any."""
        if self._decoder.lookup_word(word) is not None:
            if word in self._guessed:
                findings.note("spelled by rule", f"{where}: {word}")
            return True
        sounds = sounds_of(word)
        if not sounds:
            return False
        self._decoder.add_word(word, sounds, True)
        self._guessed.add(word)
        findings.note("spelled by rule", f"{where}: {word}")
        return True

    @cached_property
    def _guessed(self) -> set[str]:
        return set()


def sounds_of(word: str) -> str:
    """Phones by the letters alone; empty where there is no English letter or digit."""
    out, at = [], 0
    while at < len(word):
        size = next((n for n in (4, 3, 2, 1) if word[at : at + n] in _SPELLED), 0)
        if size:
            out.append(_SPELLED[word[at : at + size]])
        at += size or 1
    return " ".join(out)
