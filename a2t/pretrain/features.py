"""Log-mel and, later, the frozen encoder's embeddings of a corpus, each one memory-mapped file with row offsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
from tqdm import tqdm

from a2t.audio.conv_encoder import FRAMES, HOP, MELS, PER_UNIT, WINDOW, ConvEncoder, LogMel
from a2t.data.manifest import Manifest, Row

WORD_END_DELAY = 0.06
"""Seconds after a word's end at which its token is due: the last phoneme has then been heard."""


@dataclass(frozen=True)
class Corpus:
    """Rows with a memory-mapped array [sum of units, per unit, features]."""

    rows: list[Row]
    data: np.ndarray
    offsets: list[int]  # in units

    def of(self, n: int, first: int = 0, units: int | None = None) -> np.ndarray:
        """Units [first, first + units) of row n, flattened to [units * per unit, features], float32."""
        last = self.rows[n].units() if units is None else first + units
        return np.asarray(self.data[self.offsets[n] + first : self.offsets[n] + last], np.float32).reshape(
            -1, self.data.shape[-1]
        )


def _offsets(rows: list[Row]) -> list[int]:
    return [int(o) for o in np.cumsum([0] + [r.units() for r in rows])]


def log_mel(manifest: Path) -> Corpus:
    """Computes manifest.parent/mel.npy (float16) once."""
    return _cached(manifest, "mel.npy", (FRAMES, MELS), lambda rows: _mel_rows(manifest, rows))


def embeddings(manifest: Path, encoder: ConvEncoder, name: str) -> Corpus:
    """Encoder states [units, 10, hidden] (float16) of a corpus; the encoder is frozen from here on."""
    mel = log_mel(manifest)

    @torch.inference_mode()
    def make(rows: list[Row]) -> Iterator[np.ndarray]:
        for n in range(len(rows)):
            x = torch.from_numpy(mel.of(n)).view(1, -1, MELS)
            caches, parts = None, []
            for chunk in x.split(30 * FRAMES, 1):
                h, caches = encoder(chunk, caches)
                parts.append(h)
            yield torch.cat(parts, 1).view(-1, PER_UNIT, h.shape[-1]).half().numpy()

    return _cached(manifest, f"{name}.npy", (PER_UNIT, encoder.config.hidden), make)


def _cached(manifest: Path, name: str, shape: tuple[int, int], make) -> Corpus:  # type: ignore[no-untyped-def]
    rows = Manifest.read(manifest)
    offsets = _offsets(rows)
    path = manifest.parent / name
    if not path.exists():
        part = path.with_name("part-" + name)
        out = np.lib.format.open_memmap(part, "w+", np.float16, (offsets[-1], *shape))
        for n, block in enumerate(tqdm(make(rows), total=len(rows), desc=f"{manifest.parent.name}/{name}")):
            out[offsets[n] : offsets[n + 1]] = block
        out.flush()
        del out
        part.replace(path)
    return Corpus(rows, np.load(path, mmap_mode="r"), offsets)


def _mel_rows(manifest: Path, rows: list[Row]) -> Iterator[np.ndarray]:
    mel = LogMel()
    for row in rows:
        pcm, _ = soundfile.read(Manifest.audio_path(manifest, row), dtype="float32")
        padded = np.concatenate([np.zeros(WINDOW - HOP, np.float32), pcm])
        yield mel(torch.from_numpy(padded)[None])[0].view(-1, FRAMES, MELS).half().numpy()


def word_frames(row: Row) -> list[int]:
    """The 100 ms frame in which each word's end is due; a taken frame pushes to the next."""
    frames: list[int] = []
    for word in row.words:
        frames.append(max(int((word.end + WORD_END_DELAY) * PER_UNIT), frames[-1] + 1 if frames else 0))
    return frames


def word_ends(row: Row, ids: dict[str, int]) -> np.ndarray:
    """[units * 10] token id in the 100 ms frame where its word ends, 0 elsewhere."""
    out = np.zeros(row.units() * PER_UNIT, np.int64)
    for word, frame in zip(row.words, word_frames(row), strict=True):
        if frame < len(out):
            out[frame] = ids[word.word]
    return out
