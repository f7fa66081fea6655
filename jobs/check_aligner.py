"""How exact the aligner of `jobs.prepare` is: `python -m jobs.check_aligner [--utterances 200] [--noise-db 30]`.

Speaks sentences of the embedded world with espeak-ng, whose word times are known (to about 8 ms), aligns them, and
compares.  Synthetic and clean: on people's speech expect more.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from random import Random

import numpy as np
from scipy.signal import resample_poly
from tqdm import tqdm

from a2t.data import world
from a2t.data.aligner import RATE, Aligner
from a2t.data.espeak import SAMPLE_RATE, Espeak, Utterance
from a2t.data.findings import Findings
from a2t.data.synthesis import VOICES, Speaker


def sentence(rng: Random) -> str:
    make = [
        lambda: world.chatter(rng, True),
        lambda: world.state_fact(rng, world.draw_fact(rng, True)),
        lambda: world.ask_fact(rng, world.draw_fact(rng, True)),
    ]
    return " ".join(rng.choice(make)().words)


def spoken(engine: Espeak, text: str, speaker: Speaker) -> Utterance:
    for _ in range(4):  # espeak-ng now and then returns nothing
        said = engine.say(text, speaker.voice, speaker.rate, speaker.pitch, speaker.pitch_range)
        if len(said.pcm_S) > 0.1 * SAMPLE_RATE:
            return said
    raise RuntimeError(f"espeak-ng gave no speech for {text!r} with voice {speaker.voice}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.check_aligner", description=str(__doc__).splitlines()[0])
    parser.add_argument("--utterances", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise-db", type=float, help="add white noise this many dB below the speech (default: none)")
    args = parser.parse_args(argv)
    if args.utterances < 1:
        parser.error("--utterances must be at least 1")
    rng, noise = Random(args.seed), np.random.default_rng(args.seed)
    engine, aligner, findings = Espeak(), Aligner(), Findings()
    voices = [v for split in ("train", "dev", "test") for v in VOICES[split]]
    starts: list[float] = []
    ends: list[float] = []
    failed, audio_s, spent_s = 0, 0.0, 0.0
    for n in tqdm(range(args.utterances), unit="utterance", mininterval=0.5 if sys.stderr.isatty() else 20):
        text, speaker = sentence(rng), Speaker.draw(rng, voices)
        said = spoken(engine, text, speaker)
        pcm_S = resample_poly(said.pcm_S, 320, 441).astype(np.float32)
        if args.noise_db is not None and len(pcm_S):
            level = np.sqrt(np.mean(pcm_S**2)) * 10 ** (-args.noise_db / 20)
            pcm_S = pcm_S + level * noise.standard_normal(len(pcm_S), dtype=np.float32)
        since = time.perf_counter()
        found = aligner.align(pcm_S, text.split(), str(n), findings)
        spent_s += time.perf_counter() - since
        audio_s += len(pcm_S) / RATE
        if found is None:
            failed += 1
            continue
        starts += [i.start - known for i, known in zip(found, said.starts, strict=True)]
        ends += [i.end - known for i, known in zip(found, said.ends, strict=True)]
    if not ends:
        print("check_aligner: no utterance could be aligned", file=sys.stderr)
        return 1
    print(f"{args.utterances} utterances, {len(ends)} words, {failed} utterances not aligned")
    print(f"{audio_s:.0f} s of speech, aligned {audio_s / spent_s:.0f} times as fast as it was spoken")
    for name, errors in (("starts", starts), ("ends", ends)):
        off = 1000 * np.abs(errors)
        print(
            f"word {name}: mean error {off.mean():.1f} ms, median {np.median(off):.1f}, largest {off.max():.0f};",
            end=" ",
        )
        print(f"{(off <= 50).mean():.1%} within 50 ms; bias {1000 * np.mean(errors):+.1f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
