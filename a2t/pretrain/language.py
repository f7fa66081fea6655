"""Phases 2 to 4: the language model learns the world from text, then from imagined sessions, then from real audio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from a2t.models.language import NO_MASK
from a2t.models.tiny import TinyModules
from a2t.pretrain.features import Corpus
from a2t.pretrain.guidance import Guidance, Watch
from a2t.pretrain.loop import Schedule, Workers, run_phase
from a2t.pretrain.sample import Sample
from a2t.pretrain.samples import CLASSES, Sampler

GUIDANCE_WEIGHT = 0.3
REPEATS = 0.15
"""Share of the steps that ask to repeat what was said: the base transcribes on request, and the side channel starts
from a model that can."""
BLANK = 0.97
"""A frame whose word head is this sure that no word ends may be left out of a training sequence."""


class Student(nn.Module):
    """Language model, adaptor and the throw-away guidance heads; the encoder is frozen and not part of it."""

    def __init__(self, modules: TinyModules):
        super().__init__()
        self.llm, self.adaptor = modules.llm, modules.adaptor
        self.guidance = Guidance(modules.config.hidden)


@dataclass
class LanguageTrainer:
    modules: TinyModules
    student: Student
    sampler: Sampler
    budget: int = 2560
    """Positions a worker and step, padding included."""

    def __post_init__(self) -> None:
        self.watch = Watch(self.modules.llm)
        self.modules.llm.set_attn_implementation("sdpa")
        for module in self.modules.llm.modules():
            if isinstance(module, Qwen3RMSNorm):
                module.forward = _fused(module)  # the same function in one kernel: a tenth of a step on CPU
        for p in self.modules.encoder.parameters():
            p.requires_grad_(False)

    def loss(
        self, samples: Sequence[Sample], heard: Callable[[Sample], np.ndarray] | None
    ) -> tuple[Tensor, dict[str, float]]:
        """Weighted cross-entropy at the predicted positions plus guidance, and accuracies by class."""
        logits_NV, target_N, weight_N, class_N = self.predict(samples, heard)
        each_N = F.cross_entropy(logits_NV, target_N, reduction="none")
        value = (each_N * weight_N).sum() / weight_N.sum()
        guided, figures = self.watch.losses(self.student.guidance, samples)
        figures["cross_entropy"] = float(value.detach())
        return value + GUIDANCE_WEIGHT * guided, {**figures, **accuracies(logits_NV, target_N, class_N)}

    def predict(
        self, samples: Sequence[Sample], heard: Callable[[Sample], np.ndarray] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, targets, weights and classes of all predicted positions of a batch padded on the right."""
        B, T = len(samples), max(len(s) for s in samples)
        ids, positions = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T, dtype=torch.long)
        target, weight, kind = torch.full((B, T), -1), torch.zeros(B, T), torch.zeros(B, T, dtype=torch.long)
        for b, s in enumerate(samples):
            n = len(s)
            ids[b, :n] = torch.from_numpy(np.maximum(s.ids_T, 0))
            positions[b, :n], target[b, :n] = torch.from_numpy(s.positions_T), torch.from_numpy(s.targets_T)
            weight[b, :n], kind[b, :n] = torch.from_numpy(s.weights_T), torch.from_numpy(s.classes_T)
        e_BTD = self.modules.llm.model.embed_tokens(ids)
        if heard is not None:
            where = [torch.from_numpy(np.nonzero(s.audio_T >= 0)[0]) for s in samples]
            rows = torch.cat([torch.full_like(w, b) for b, w in enumerate(where)])
            states = np.concatenate([heard(s)[s.audio_T[s.audio_T >= 0]] for s in samples])
            e_BTD = e_BTD.index_put(
                (rows, torch.cat(where)), self.modules.hear(torch.from_numpy(states)).to(e_BTD.dtype)
            )
        # causal and padded on the right: padding changes nothing before it, so no mask is needed
        h_BTD = self.modules.llm.model(
            inputs_embeds=e_BTD, position_ids=positions, attention_mask=NO_MASK, use_cache=False
        ).last_hidden_state
        chosen = target >= 0
        return self.modules.llm.lm_head(h_BTD[chosen]).float(), target[chosen], weight[chosen], kind[chosen]

    def batch(self, make: Callable[[], Sample]) -> list[Sample]:
        """Samples until the padded batch is full; at least one."""
        samples: list[Sample] = []
        longest = 0
        while True:
            sample = make()
            longest = max(longest, len(sample))
            if samples and (len(samples) + 1) * longest > self.budget:
                return samples
            samples.append(sample)


def _fused(norm: Qwen3RMSNorm) -> Callable[[Tensor], Tensor]:
    return lambda x: F.rms_norm(x, (x.shape[-1],), norm.weight.to(x.dtype), norm.variance_epsilon)


def accuracies(logits_NV: Tensor, target_N: Tensor, class_N: Tensor) -> dict[str, float]:
    right_N = logits_NV.argmax(-1) == target_N
    return {
        name: float(right_N[class_N == c].float().mean())
        for c, name in enumerate(CLASSES)
        if c and bool((class_N == c).any())
    }


def train_on_text(trainer: LanguageTrainer, schedule: Schedule, folder: Path, workers: Workers, seed: int) -> None:
    """Compact text first, then more and more imagined sessions."""

    def loss(step: int, rng: Random) -> tuple[Tensor, dict[str, float]]:
        progress = step / schedule.steps
        sampler, repeat = trainer.sampler, rng.random() < REPEATS
        if progress < 0.35 or rng.random() < 0.25:
            text = (lambda: sampler.repeated(rng)) if repeat else (lambda: sampler.compact(rng, progress))
            return trainer.loss(trainer.batch(text), None)
        return trainer.loss(trainer.batch(lambda: sampler.imagined(rng, (progress - 0.35) / 0.65, repeat)), None)

    run_phase("text", trainer.student, loss, schedule, folder, workers, seed)


class Heard:
    """A corpus of encoder states with sessions grouped by length, so that batches pad little."""

    def __init__(self, corpus: Corpus, modules: TinyModules):
        self.corpus, self.modules = corpus, modules
        self.by_length = sorted(range(len(corpus.rows)), key=lambda n: corpus.rows[n].units())
        self.lengths = np.array([corpus.rows[n].units() for n in self.by_length])
        self.up_to = np.cumsum(self.lengths)  # units of all sessions up to this one

    def states(self, sample: Sample) -> np.ndarray:
        return self.corpus.of(sample.row)

    def draw(self, rng: Random, trainer: LanguageTrainer, longest: int, drop: float) -> list[Sample]:
        """Neighbours in length from a random place, every second of audio equally likely."""
        last = int(np.searchsorted(self.lengths, longest, side="right"))
        at = int(np.searchsorted(self.up_to, rng.randrange(int(self.up_to[last - 1])), side="right"))
        near = iter([rng.randint(max(0, at - 40), min(last - 1, at + 40)) for _ in range(200)])

        def make() -> Sample:
            n = self.by_length[next(near)]
            sample = trainer.sampler.session(rng, self.corpus.rows[n], drop, self._blank(n) if drop else None)
            sample.row = n
            return sample

        return trainer.batch(make)

    def draw_prompted(self, rng: Random, trainer: LanguageTrainer, drop: float) -> list[Sample]:
        """Pieces of up to 16 s from anywhere, each with the request to repeat it."""

        def make() -> Sample:
            while True:
                at = int(np.searchsorted(self.up_to, rng.randrange(int(self.up_to[-1])), side="right"))
                n = self.by_length[at]
                blank = self._blank(n) if drop else None
                sample = trainer.sampler.prompted(rng, self.corpus.rows[n], rng.randint(4, 16), drop, blank)
                if sample is not None:
                    sample.row = n
                    return sample

        return trainer.batch(make)

    @torch.no_grad()
    def _blank(self, n: int) -> np.ndarray:
        logits = self.modules.encoder.word_head(torch.from_numpy(self.corpus.of(n)))
        return (torch.softmax(logits, -1)[:, 0] > BLANK).numpy()


def train_on_audio(
    trainer: LanguageTrainer, heard: Heard, dev: Heard, schedule: Schedule, folder: Path, workers: Workers, seed: int
) -> None:
    """Cached encoder states; first with most silent frames left out and shorter sessions, then everything."""

    def loss(step: int, rng: Random) -> tuple[Tensor, dict[str, float]]:
        progress = step / schedule.steps
        if rng.random() < 0.1:
            return trainer.loss(trainer.batch(lambda: trainer.sampler.compact(rng, 1.0)), None)
        sparse = progress < 0.45
        if rng.random() < REPEATS:
            return trainer.loss(heard.draw_prompted(rng, trainer, 0.9 if sparse else 0.0), heard.states)
        longest = 100 if progress < 0.2 else 400
        return trainer.loss(heard.draw(rng, trainer, longest, 0.9 if sparse else 0.0), heard.states)

    def evaluate() -> dict[str, float]:
        return evaluate_forced(trainer, dev)

    run_phase("audio", trainer.student, loss, schedule, folder, workers, seed, evaluate=evaluate, evaluate_every=200)


@torch.inference_mode()
def evaluate_forced(
    trainer: LanguageTrainer, dev: Heard, limit: int = 24, offset: int = 0, gap: int = 0
) -> dict[str, float]:
    """Accuracy by class with the gold past given; `offset` and `gap` (in the middle) shift the positions."""
    totals: dict[str, list[float]] = {}
    for n in range(min(limit, len(dev.corpus.rows))):
        samples = [trainer.sampler.session(Random(0), dev.corpus.rows[n], offset=False)]
        samples += [s for s in (trainer.sampler.prompted(Random(n), dev.corpus.rows[n], 16),) if s is not None]
        for sample in samples:
            sample.row = n
            sample.positions_T = sample.positions_T + offset
            sample.positions_T[len(sample) // 2 :] += gap
            logits, target, _, kind = trainer.predict([sample], dev.states)
            right = logits.argmax(-1) == target
            for c, name in enumerate(CLASSES):
                if (kind == c).any() and (sample is samples[0]) == (name != "transcript"):
                    entry = totals.setdefault(f"dev_{name}", [0.0, 0.0])
                    entry[0] += float(right[kind == c].sum())
                    entry[1] += float((kind == c).sum())
    return {k: a / b for k, (a, b) in totals.items()}
