"""The user's part of the conversation: what the evaluation's sessions are made of, one of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

from a2t.data.conversation import Plan
from a2t.data.embedded_corpus import TEN_MINUTES
from a2t.data.manifest import Manifest, Row
from a2t.data.synthesis import RATE, Part, write_corpus


def script(out: Path, minutes: float, seed: int) -> tuple[Row, np.ndarray]:
    """One conversation of the test split (sentences, combinations and voice held out) and its audio [S], 16 kHz
    float32. Rendered once into `out`/script."""
    ten = TEN_MINUTES
    scale = minutes / 10
    plan = Plan(60 * minutes, max(1, round(ten.facts * scale)), round(ten.arrivals * scale))
    folder = out / "script" / f"{minutes:g}min-seed{seed}"
    manifest = write_corpus(folder, [Part("ten", plan, sessions=1, vary=False)], 1000 + seed, "test", shards=1)
    (row,) = Manifest.read(manifest)
    pcm_S, rate = soundfile.read(Manifest.audio_path(manifest, row), dtype="float32")
    assert rate == RATE
    return row, pcm_S
