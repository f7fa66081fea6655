"""The corpora of the embedded default, by name. Seeds and sizes are what the shipped model was made with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from a2t.data.conversation import Plan
from a2t.data.synthesis import Part, write_corpus

MIX = Part("mix", Plan(60, 5, 2, mixed=True, prompt_facts=0.15), hours=10)
SHORT = Part("short", Plan(9, 1, 0, mixed=True), hours=3)
LONG = Part("long", Plan(300, 8, 3, ask_from=0.45, ask_chance=0.4), hours=5)
UTTERANCES = Part("utterance", Plan(10, 1, 0, mixed=True), hours=5)
STREAMS = Part("stream", Plan(600, 22, 6, ask_from=0.35, ask_chance=0.7), hours=10)
TEN_MINUTES = Plan(600, 13, 4)


def train(folder: Path, scale: float = 1.0, shards: int = 2) -> Path:
    parts = [replace(p, hours=p.hours * scale) for p in (MIX, SHORT, LONG)]
    return write_corpus(folder, parts, seed=0, split="train", shards=shards)


def utterances(folder: Path, scale: float = 1.0, shards: int = 2) -> Path:
    """What the adapter is trained on: transcribed speech of at most 16 s a piece."""
    part = replace(UTTERANCES, hours=UTTERANCES.hours * scale)
    return write_corpus(folder, [part], seed=2, split="adapt", shards=shards)


def streams(folder: Path, scale: float = 1.0, shards: int = 2) -> Path:
    """Short utterances laid end to end in the order in which one speaker said them, five to twelve minutes long: what
    is asked has been said minutes before, as it will be when the adapter is used."""
    part = replace(STREAMS, hours=STREAMS.hours * scale)
    return write_corpus(folder, [part], seed=3, split="adapt", shards=shards)


def dev(folder: Path, shards: int = 2) -> Path:
    parts = [Part("mix", MIX.plan, 0.2), Part("ten", TEN_MINUTES, sessions=16, vary=False)]
    return write_corpus(folder, parts, seed=1, split="dev", shards=shards)


def held_out(folder: Path, sessions: int = 20, seed: int = 0, shards: int = 2, minutes: float = 10) -> Path:
    """Held-out sentences, held-out combinations, held-out voices: ten-minute conversations, or shorter ones of the
    same make."""
    ten, scale = TEN_MINUTES, minutes / 10
    plan = replace(
        ten, seconds=60 * minutes, facts=max(1, round(ten.facts * scale)), arrivals=round(ten.arrivals * scale)
    )
    return write_corpus(folder, [Part("ten", plan, sessions=sessions, vary=False)], 1000 + seed, "test", shards)
