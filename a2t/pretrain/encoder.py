"""Phase 1: the encoder learns which word ends in each 100 ms frame."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from a2t.audio.conv_encoder import FRAMES, MELS, PER_UNIT, ConvEncoder
from a2t.pretrain.features import Corpus, word_ends
from a2t.pretrain.loop import Schedule, Workers, run_phase

WINDOW_UNITS = 10


def train_encoder(
    encoder: ConvEncoder, train: Corpus, dev: Corpus, ids: dict[str, int], schedule: Schedule, folder: Path,
    workers: Workers, windows: int = 6,
) -> None:  # fmt: skip
    """`windows` of 10 s a worker and step, cut anywhere in the corpus; two mel bands of up to 10 are hidden in each."""
    ends = [word_ends(row, ids) for row in train.rows]
    long_enough = [n for n, row in enumerate(train.rows) if row.units() >= WINDOW_UNITS]
    weights = np.cumsum([train.rows[n].units() for n in long_enough])

    def loss(step: int, rng: Random) -> tuple[Tensor, dict[str, float]]:
        mel, target = [], []
        for _ in range(windows):
            n = long_enough[int(np.searchsorted(weights, rng.randrange(int(weights[-1])), side="right"))]
            first = rng.randint(0, train.rows[n].units() - WINDOW_UNITS)
            x = train.of(n, first, WINDOW_UNITS)
            x += rng.uniform(-0.1, 0.1)
            for _ in range(2):
                width = rng.randint(0, 10)
                low = rng.randint(0, MELS - width)
                x[:, low : low + width] = x.mean()
            mel.append(x)
            target.append(ends[n][first * PER_UNIT : (first + WINDOW_UNITS) * PER_UNIT])
        h, _ = encoder(torch.from_numpy(np.stack(mel)))
        logits_NV = encoder.word_head(h).flatten(0, 1)
        target_N = torch.from_numpy(np.stack(target)).flatten()
        value = F.cross_entropy(logits_NV, target_N)
        spoken = target_N > 0
        right = (logits_NV.argmax(-1) == target_N)[spoken].float().mean()
        return value, {"word_accuracy": float(right)}

    run_phase("encoder", encoder, loss, schedule, folder, workers, evaluate=lambda: word_errors(encoder, dev, ids))


@torch.inference_mode()
def word_errors(encoder: ConvEncoder, corpus: Corpus, ids: dict[str, int], limit: int = 600) -> dict[str, float]:
    """Word error rate of the head's argmax, frame by frame, over at most `limit` units."""
    import jiwer

    names = {i: w for w, i in ids.items()}
    truth, heard, units = [], [], 0
    for n, row in enumerate(corpus.rows):
        if units >= limit:
            break
        take = min(row.units(), 100)
        units += take
        h, _ = encoder(torch.from_numpy(corpus.of(n, 0, take)).view(1, take * FRAMES, MELS))
        best = encoder.word_head(h)[0].argmax(-1).tolist()
        heard.append(" ".join(names[i] for i in best if i in names))
        truth.append(" ".join(w.word for w in row.words if w.end < take))
    return {"dev_word_errors": float(jiwer.wer(truth, heard))}
