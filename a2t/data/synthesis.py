"""Sessions of the embedded world as audio: voices, rooms, noise, and a corpus on disk.

`render_session` gives 16 kHz float32; `write_corpus` writes wav files and the manifest that every later step reads.
Deterministic for (seed, voices, plan) in a fresh process, because espeak-ng is (see espeak.py): shards are rendered in
processes of their own.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np
import soundfile
from scipy.signal import fftconvolve, resample_poly

from a2t.data.conversation import Plan, Said, Session, converse
from a2t.data.espeak import SAMPLE_RATE, Espeak, Utterance
from a2t.data.manifest import Manifest, Row
from a2t.data.world import Sentence

RATE = 16_000
ACCENTS = ("en-us", "en")
VARIANTS = (
    "f1 f2 f3 f5 m1 m2 m3 m4 m5 m6 m8 Alex Alicia Andrea Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco "
    "Mario Michael Mike Reed adam anika announcer antonio aunty edward edward2 ian iven iven2 iven3 marcelo michel "
    "pablo pedro robert sandro steph steph2 victor"
).split()
ADAPT_VARIANTS = "boris caleb david ed gustave john kaukovalta miguel norbert quincy rob shelby travis zac".split()
HELD_OUT_VARIANTS = "f4 m7 Andy belinda paul max".split()
DEV_VARIANTS = "linda benjamin".split()
VOICES = {
    split: tuple(f"{a}+{v}" for a in ACCENTS for v in variants)
    for split, variants in (
        ("train", VARIANTS),
        ("adapt", ADAPT_VARIANTS),
        ("dev", DEV_VARIANTS),
        ("test", HELD_OUT_VARIANTS),
    )
}
"""Variants are disjoint between splits. The base model learns from `train` and the adapter from `adapt`, so that it
meets the errors that the encoder makes on voices it does not know; `dev` is what may be tuned on, `test` is only ever
reported."""


@dataclass(frozen=True)
class Speaker:
    """A voice and the way it speaks."""

    voice: str
    rate: int
    pitch: int
    pitch_range: int

    @classmethod
    def draw(cls, rng: Random, voices: Sequence[str]) -> Speaker:
        return cls(rng.choice(voices), rng.randint(130, 205), rng.randint(25, 75), rng.randint(20, 80))


class Voice:
    """Speaks sentences for a time line and keeps their samples by sentence."""

    def __init__(self, engine: Espeak, speaker: Speaker, rng: Random):
        self.engine, self.speaker, self.rng = engine, speaker, rng
        self.pcm: dict[int, np.ndarray] = {}

    def __call__(self, sentence: Sentence) -> tuple[list[float], list[float]]:
        s = self.speaker
        rate = max(100, s.rate + self.rng.randint(-8, 8))
        gap = self.rng.choice([0, 0, 0, 1, 2])
        said = self._say(" ".join(sentence.words), rate, gap)
        first = said.starts[0]
        self.pcm[id(sentence)] = resample_poly(said.pcm_S, 320, 441).astype(np.float32)[round(first * RATE) :]
        return [t - first for t in said.starts], [t - first for t in said.ends]

    def _say(self, text: str, rate: int, gap: int) -> Utterance:
        for _ in range(4):  # espeak-ng now and then returns nothing
            said = self.engine.say(text, self.speaker.voice, rate, self.speaker.pitch, self.speaker.pitch_range, gap)
            if len(said.pcm_S) > 0.1 * SAMPLE_RATE:
                return said
        raise RuntimeError(f"espeak-ng gave no speech for {text!r} with voice {self.speaker.voice}")


def render_session(session: Session, pcm: dict[int, np.ndarray]) -> np.ndarray:
    """Clean 16 kHz speech [units * 16000]; pauses cut into the sentences where they belong."""
    out_S = np.zeros(session.units * RATE, np.float32)
    for said in session.said:
        _lay(out_S, said, pcm[id(said.sentence)])
    return out_S


def _lay(out_S: np.ndarray, said: Said, pcm_S: np.ndarray) -> None:
    """Cuts the sentence's samples at its pauses and adds each piece where its words are."""
    pauses = said.sentence.pauses
    shift, begin = said.start, 0
    edges = []
    passed = 0.0
    for i in sorted(pauses):
        edges.append((int((said.ends[i] - shift - passed) * RATE), pauses[i]))
        passed += pauses[i]
    edges.append((len(pcm_S), 0.0))
    at = shift
    for end, pause in edges:
        piece = pcm_S[begin:end]
        start = round((at + begin / RATE) * RATE)
        piece = piece[: max(0, len(out_S) - start)]
        out_S[start : start + len(piece)] += piece
        begin, at = end, at + pause


def soil(rng: Random, clean_S: np.ndarray) -> np.ndarray:
    """Level, room, spectral tilt and noise as a microphone would add them."""
    noise = np.random.default_rng(rng.getrandbits(32))
    x_S = clean_S
    if rng.random() < 0.4:
        x_S = fftconvolve(x_S, _room(rng, noise))[: len(x_S)].astype(np.float32)
    if rng.random() < 0.5:
        tilt = rng.uniform(-0.35, 0.35)
        x_S = x_S + np.float32(tilt) * np.concatenate([[np.float32(0)], x_S[:-1]])
    x_S = x_S * np.float32(10 ** (rng.uniform(-12, 3) / 20))
    hiss_S = noise.standard_normal(len(x_S), dtype=np.float32)
    if rng.random() < 0.5:  # a low hum of a room rather than white noise
        hiss_S = 3.0 * np.convolve(hiss_S, np.full(8, 0.125, np.float32), mode="same")
    x_S = x_S + hiss_S * np.float32(10 ** (rng.uniform(-70, -38) / 20))
    return np.clip(x_S, -1.0, 1.0).astype(np.float32)


def _room(rng: Random, noise: np.random.Generator) -> np.ndarray:
    """A direct path and an exponentially decaying tail of 0.1 to 0.35 s."""
    seconds = rng.uniform(0.1, 0.35)
    n = int(seconds * RATE)
    tail = noise.standard_normal(n).astype(np.float32) * np.exp(-6.9 * np.arange(n) / n).astype(np.float32)
    tail *= rng.uniform(0.1, 0.45) / np.sqrt((tail**2).sum())
    tail[0] = 1.0
    return tail


@dataclass(frozen=True)
class Part:
    """A share of a corpus: sessions of one make until `hours` are full."""

    name: str
    plan: Plan
    hours: float = 0.0
    sessions: int = 0
    vary: bool = True  # shorter and longer sessions around the plan


def draw_plan(rng: Random, part: Part) -> Plan:
    if not part.vary:
        return part.plan
    plan = part.plan
    scale = rng.uniform(0.5, 1.25)
    return Plan(
        **{
            **asdict(plan),
            "seconds": plan.seconds * scale,
            "facts": max(1, round(plan.facts * scale * rng.uniform(0.6, 1.3))) if plan.facts else 0,
            "arrivals": rng.choice([0, plan.arrivals]) if plan.arrivals else 0,
        }
    )


def write_corpus(
    folder: Path, parts: Sequence[Part], seed: int, split: str, shards: int = 2, noisy: bool = True
) -> Path:
    """Renders `parts` into folder/*.wav and folder/manifest.jsonl; returns the manifest's path. Skips what is done:
    a shard is whole or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.jsonl"
    if manifest.exists():
        return manifest
    jobs = [(folder, p, seed, shard, shards, split, noisy) for p in parts for shard in range(shards)]
    context = multiprocessing.get_context("spawn")  # a fresh process a shard: espeak-ng repeats exactly only there
    with context.Pool(min(shards, len(jobs)), maxtasksperchild=1) as pool:
        shards_done = pool.starmap(_write_shard, jobs, chunksize=1)
    rows = [row for path in shards_done for row in Manifest.iterate(path)]
    Manifest.write(manifest, rows)
    return manifest


def _write_shard(folder: Path, part: Part, seed: int, shard: int, shards: int, split: str, noisy: bool) -> Path:
    path = folder / f"{part.name}-{shard}.jsonl"
    if path.exists():
        return path
    rng = Random(f"{seed}/{part.name}/{shard}")
    engine = Espeak()
    rows: list[Row] = []
    seconds, n = 0.0, 0
    while (seconds < part.hours * 3600 / shards) if part.hours else (n < len(range(shard, part.sessions, shards))):
        speaker = Speaker.draw(rng, VOICES[split])
        voice = Voice(engine, speaker, rng)
        session = converse(rng, voice, draw_plan(rng, part), held_out=split == "test")
        audio_S = render_session(session, voice.pcm)
        if noisy:
            audio_S = soil(rng, audio_S)
        name = f"{part.name}-{shard}-{n:05d}"
        soundfile.write(folder / f"{name}.wav", audio_S, RATE, subtype="PCM_16")
        rows.append(session.row(name, f"{name}.wav", speaker.voice, split))
        seconds, n = seconds + session.units, n + 1
    Manifest.write(path, rows)
    return path


def corpus_hash(manifest: Path) -> str:
    """SHA-256 over the manifest and every audio file it names."""
    digest = hashlib.sha256()
    for row in Manifest.iterate(manifest):
        digest.update(json.dumps(row.to_json(), sort_keys=True).encode())
        digest.update((manifest.parent / row.audio).read_bytes())
    return digest.hexdigest()
