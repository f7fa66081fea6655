"""The corpora of the embedded default, by name. Seeds and sizes are what the shipped model was made with."""

from __future__ import annotations

from pathlib import Path

from a2t.data.conversation import Plan
from a2t.data.synthesis import Part, write_corpus

MIX = Part("mix", Plan(60, 5, 2, mixed=True, prompt_facts=0.15), hours=9)
SHORT = Part("short", Plan(9, 1, 0, mixed=True), hours=2.5)
LONG = Part("long", Plan(300, 8, 3, ask_from=0.45, ask_chance=0.4), hours=4)
TEN_MINUTES = Plan(600, 13, 4)


def train(folder: Path, scale: float = 1.0, shards: int = 2) -> Path:
    parts = [Part(p.name, p.plan, p.hours * scale, vary=p.vary) for p in (MIX, SHORT, LONG)]
    return write_corpus(folder, parts, seed=0, split="train", shards=shards)


def dev(folder: Path, shards: int = 2) -> Path:
    parts = [Part("mix", MIX.plan, 0.2), Part("ten", TEN_MINUTES, sessions=4, vary=False)]
    return write_corpus(folder, parts, seed=1, split="dev", shards=shards)


def test(folder: Path, sessions: int = 20, seed: int = 0, shards: int = 2) -> Path:
    """Held-out sentences, held-out combinations, held-out voices: ten-minute conversations."""
    return write_corpus(folder, [Part("ten", TEN_MINUTES, sessions=sessions, vary=False)], 1000 + seed, "test", shards)
