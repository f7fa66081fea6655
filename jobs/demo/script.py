"""The user's part of the conversation: what the evaluation's sessions are made of, one of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

from a2t.data import embedded_corpus
from a2t.data.manifest import Manifest, Row
from a2t.data.synthesis import RATE


def script(out: Path, minutes: float, seed: int) -> tuple[Row, np.ndarray]:
    """One conversation of the test split (sentences, combinations and voice held out) and its audio [S], 16 kHz
    float32. Rendered once into `out`/script."""
    folder = out / "script" / f"{minutes:g}min-seed{seed}"
    manifest = embedded_corpus.held_out(folder, sessions=1, seed=seed, shards=1, minutes=minutes)
    (row,) = Manifest.read(manifest)
    pcm_S, rate = soundfile.read(Manifest.audio_path(manifest, row), dtype="float32")
    assert rate == RATE
    return row, pcm_S
