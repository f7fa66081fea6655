"""The recipe of the embedded default, phase by phase. What the shipped file was made with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from a2t.data import world
from a2t.models.tiny import TinyConfig, TinyModules, WordTokenizer, save_modules
from a2t.pretrain import features
from a2t.pretrain.encoder import train_encoder, word_errors
from a2t.pretrain.language import Heard, LanguageTrainer, Student, evaluate_forced, train_on_audio, train_on_text
from a2t.pretrain.loop import Schedule, Workers
from a2t.pretrain.report import learning_curve
from a2t.pretrain.samples import Sampler

PHASES = ("encoder", "text", "audio")
ENCODER = Schedule(steps=4800, lr=1.2e-3, warmup=100, decay_from=0.3)
TEXT = Schedule(steps=350, lr=1.5e-3, warmup=60, decay_from=0.6, floor=0.1)
AUDIO = Schedule(steps=1100, lr=1.0e-3, warmup=50, decay_from=0.5)


def new_modules(seed: int) -> tuple[TinyModules, WordTokenizer]:
    """Fresh weights: wide embeddings and damped residual outputs, which learned fastest in trials."""
    torch.manual_seed(seed)
    tokenizer = WordTokenizer.of_words(world.WORDS)
    modules = TinyModules(TinyConfig(vocab=tokenizer.size, prompt=world.DEFAULT_PROMPT))
    depth = 2 * modules.config.layers
    for name, p in modules.llm.named_parameters():
        if p.dim() < 2:
            continue
        std = 0.16 if "embed_tokens" in name else 0.04
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= depth**0.5
        torch.nn.init.normal_(p, std=std)
    torch.nn.init.zeros_(modules.llm.model.embed_tokens.weight.data[0])  # id 0: silence
    return modules, tokenizer


def scaled(schedule: Schedule, scale: float) -> Schedule:
    return replace(schedule, steps=max(2, round(schedule.steps * scale)))


def run(work: Path, out: Path, seed: int, scale: float, workers: Workers, until: str) -> None:
    """Every phase resumes from its own checkpoint in work/phases."""
    modules, tokenizer = new_modules(seed)
    sampler = Sampler(tokenizer)
    train, dev = work / "train" / "manifest.jsonl", work / "dev" / "manifest.jsonl"
    phases = work / "phases"
    if workers.lead:  # one process writes the shared files
        features.log_mel(train), features.log_mel(dev)
    wait(workers)
    mel_dev = features.log_mel(dev)
    train_encoder(
        modules.encoder, features.log_mel(train), mel_dev, sampler.ids, scaled(ENCODER, scale), phases, workers
    )
    if until == "encoder":
        return
    trainer = LanguageTrainer(modules, Student(modules), sampler)
    train_on_text(trainer, scaled(TEXT, scale), phases, workers, seed)
    if until == "text":
        return
    if workers.lead:
        features.embeddings(train, modules.encoder, "heard"), features.embeddings(dev, modules.encoder, "heard")
    wait(workers)
    heard = Heard(features.embeddings(train, modules.encoder, "heard"), modules)
    heard_dev = Heard(features.embeddings(dev, modules.encoder, "heard"), modules)
    # a silent frame is a zero vector so far, and normalising zero makes gradients of thousands
    torch.nn.init.normal_(modules.adaptor.project.bias, std=0.05, generator=torch.Generator().manual_seed(seed))
    train_on_audio(trainer, heard, heard_dev, scaled(AUDIO, scale), phases, workers, seed)
    if not workers.lead:
        return
    figures = word_errors(modules.encoder, mel_dev, sampler.ids) | evaluate_forced(trainer, heard_dev)
    for offset, gap in ((3000, 0), (9000, 0), (0, 8000)):  # accuracy is to be flat over position
        shifted = evaluate_forced(trainer, heard_dev, offset=offset, gap=gap)
        figures |= {f"{k}_offset_{offset}_gap_{gap}": v for k, v in shifted.items()}
    modules.freeze_words()
    made = {"made_by": "python -m jobs.pretrain_tiny", "seed": seed, "scale": scale, "dev": figures}
    save_modules(modules, tokenizer, out, made)
    learning_curve(phases / "log.jsonl", work / "learning_curve.png")


def wait(workers: Workers) -> None:
    if workers.size > 1:
        dist.barrier()
