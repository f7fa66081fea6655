"""A set in LongSpeech's layout from the embedded world: sessions stitched from utterances of several held-out voices.

Nobody answers in them.  People tell what they saw and where things are, and now and then that somebody came home; the
temporal questions ask who of two came first.
"""

from __future__ import annotations

import json
import multiprocessing
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import soundfile

from a2t.data import world
from a2t.data.espeak import Espeak
from a2t.data.synthesis import RATE, VOICES, Speaker, Voice, soil

ASR, TEMPORAL_QA = "ASR", "Temporal_Relative_QA"
"""The published names of the two tasks."""
ARRIVALS_PER_MINUTE = 0.6
STRETCH = 6
"""Utterances that one voice speaks before another does."""


def write_set(folder: Path, sessions: int, seed: int, minutes: float = 10) -> Path:
    """Renders the set unless it is there; returns `folder`. In a fresh process, where espeak-ng repeats exactly."""
    if not (folder / "LongSpeechQA" / TEMPORAL_QA / "test.jsonl").exists():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(_write, (folder, sessions, seed, minutes))
    return folder


def _write(folder: Path, sessions: int, seed: int, minutes: float) -> None:
    engine = Espeak()
    lines: dict[str, list[dict[str, Any]]] = {ASR: [], TEMPORAL_QA: []}
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    for n in range(sessions):
        rng = Random(f"{seed}/{n}")
        audio = f"audio/{n:04d}.flac"
        words: list[str] = []
        arrived: list[str] = []
        people = rng.sample(world.PEOPLE, min(len(world.PEOPLE), max(2, round(ARRIVALS_PER_MINUTE * minutes))))
        pieces = [_silence(0.5)]
        seconds, spoken = 0.5, 0
        while seconds < 60 * minutes or len(arrived) < len(people):
            if spoken % STRETCH == 0:
                voice = Voice(engine, Speaker.draw(rng, VOICES["test"]), rng)
            spoken += 1
            if len(arrived) < len(people) and seconds >= 60 * minutes * (len(arrived) + 0.5) / len(people):
                arrived.append(people[len(arrived)])
                sentence = world.arrive(rng, arrived[-1])
            elif rng.random() < 0.3:
                sentence = world.state_fact(rng, world.draw_fact(rng, held_out=True))
            else:
                sentence = world.chatter(rng, held_out=True)
            voice(sentence)
            pieces += [voice.pcm[id(sentence)], _silence(rng.uniform(0.3, 1.2))]
            seconds += sum(len(p) for p in pieces[-2:]) / RATE
            words += sentence.words
        soundfile.write(folder / audio, soil(rng, np.concatenate(pieces)), RATE)
        lines[ASR].append(_line(ASR, audio, "", " ".join(words)))
        for first, second in pairwise(arrived):
            asked = world.ask_order(rng, first, second)
            lines[TEMPORAL_QA].append(_line(TEMPORAL_QA, audio, " ".join(asked.words), " ".join(asked.answer or [])))
    for task, found in lines.items():
        path = folder / "LongSpeechQA" / task / "test.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
        part.replace(path)


def _silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)


def _line(task: str, audio: str, content: str, reference: str) -> dict[str, Any]:
    user = {"role": "user", "audio": audio, "content": content}
    return {"task": task, "language": "en", "messages": [user, {"role": "assistant", "content": reference}]}
