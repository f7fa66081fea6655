import gc
from pathlib import Path

import numpy as np
import pytest
import soundfile

from a2t.data.conversation import Plan
from a2t.data.espeak import Espeak
from a2t.data.manifest import Manifest
from a2t.data.synthesis import RATE, VOICES, Part, corpus_hash, write_corpus

PART = Part("mix", Plan(20, 2, 0, mixed=True, pause_chance=1.0), sessions=2)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write_corpus(tmp_path_factory.mktemp(f"c{i}"), [PART], 7, "test", shards=1, noisy=i > 0) for i in range(3)]


def test_splits_share_no_voice() -> None:
    variants = {split: {v.split("+")[1] for v in voices} for split, voices in VOICES.items()}
    assert len(VOICES["train"]) >= 24 and len(VOICES["test"]) >= 6
    assert not variants["train"] & variants["test"] and not variants["train"] & variants["dev"]
    assert not variants["dev"] & variants["test"]


def test_the_same_corpus_twice(corpora: list[Path]) -> None:
    assert corpus_hash(corpora[1]) == corpus_hash(corpora[2])
    assert corpus_hash(corpora[0]) != corpus_hash(corpora[1])


def test_words_are_loud_and_pauses_silent(corpora: list[Path]) -> None:
    """Measured on clean audio: where the manifest has words there is sound, where it has pauses there is none."""
    loud, still = [], []
    for row in Manifest.read(corpora[0]):
        pcm, rate = soundfile.read(corpora[0].parent / row.audio)
        assert rate == RATE and len(pcm) == row.duration * RATE

        def level(start: float, end: float, pcm: np.ndarray = pcm) -> float:
            return float(np.sqrt((pcm[int(start * RATE) : int(end * RATE)] ** 2).mean()))

        loud += [level(w.start, w.end) for w in row.words if w.end - w.start > 0.05]
        for turn in row.turns:
            still += [level(a + 0.05, b - 0.05) for a, b in turn.extra["pauses"]]
    assert len(still) >= 2
    assert min(loud) > 10 * max(still)


def test_word_times_of_joined_words() -> None:
    said = Espeak().say("i put the lamp in the garden")
    assert all(s < e for s, e in zip(said.starts, said.ends, strict=True)), "espeak speaks 'in the' as one word"
    assert all(e <= s + 1e-9 for e, s in zip(said.ends, said.starts[1:], strict=False))


def test_unknown_voice() -> None:
    with pytest.raises(ValueError, match="no voice 'xx-nobody'"):
        Espeak().say("hello", "xx-nobody")


def test_two_engines_of_one_process_take_turns() -> None:
    first, second = Espeak(), Espeak()
    assert len(second.say("hello there").pcm_S) > 0
    del second
    gc.collect()  # the library must not be left with the callback of an engine that is gone
    assert first.say("the red key").starts[0] == 0.0
