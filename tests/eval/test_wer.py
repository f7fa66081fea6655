import random

import jiwer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a2t.eval.latency import unit_latency
from a2t.eval.wer import TimedWord, WordErrors, align_in_time, emission_delays, normaliser, word_errors

WORDS = st.lists(st.sampled_from("the cat sat on a mat".split()), min_size=1, max_size=12)


def timed(words: list[str], step: float = 0.5, start: float = 0.0) -> list[TimedWord]:
    return [TimedWord(w, start + step * n) for n, w in enumerate(words)]


def test_corpus_rate_by_hand() -> None:
    errors = word_errors(["the cat sat", "Mm-hmm, yes!"], ["the cat", "mm hmm no yes"])
    assert (errors.substitutions, errors.deletions, errors.insertions, errors.words) == (0, 1, 1, 6)
    assert errors.rate == pytest.approx(2 / 6)
    assert "nfkc-lower-punctuation" in str(errors) and "33.33 %" in str(errors)


def test_normalisers_differ_by_name() -> None:
    assert normaliser("nfkc-lower")("  Mm-hmm,\tYES ") == "mm-hmm, yes"
    assert normaliser("nfkc-lower-punctuation")("Mm-hmm, ｙｅｓ") == "mm hmm yes"
    assert normaliser("whisper-english", {"colour": "color"})("It's the colour, um, twenty") == "it is the color 20"
    with pytest.raises(ValueError, match="needs `spellings`"):
        normaliser("whisper-english")
    with pytest.raises(ValueError, match="not one of nfkc-lower"):
        word_errors(["a"], ["a"], "plain")


def test_edges() -> None:
    assert word_errors(["", "a"], ["b", ""]).errors == 2
    with pytest.raises(ValueError, match="1 references but 2"):
        word_errors(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="no word"):
        _ = WordErrors(0, 0, 3, 0, "nfkc-lower").rate


@given(WORDS, WORDS, st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_alignment_has_jiwers_edit_count(reference: list[str], hypothesis: list[str], seed: int) -> None:
    rng = random.Random(seed)
    hyp = [TimedWord(w, rng.uniform(0, 600)) for w in hypothesis]
    steps = align_in_time(timed(reference), hyp)
    out = jiwer.process_words(" ".join(reference), " ".join(hypothesis))
    assert sum(not s.correct for s in steps) == out.substitutions + out.deletions + out.insertions
    assert [s.reference for s in steps if s.reference is not None] == list(range(len(reference)))
    assert [s.hypothesis for s in steps if s.hypothesis is not None] == list(range(len(hypothesis)))


def test_of_equal_alignments_the_nearest_in_time_counts() -> None:
    """One "the" of two was lost: only the clock tells which, so a delay of 19 s must not come out."""
    reference = [TimedWord("the", 1.0), TimedWord("the", 20.0)]
    assert emission_delays(reference, [TimedWord("the", 21.0)]) == [1.0]
    assert emission_delays(reference, [TimedWord("the", 2.5)]) == [1.5]


def test_delays_leave_wrong_words_out() -> None:
    reference = timed(["where", "is", "the", "key"])
    written = [TimedWord("where", 1.25), TimedWord("was", 1.25), TimedWord("the", 2.25), TimedWord("key", 2.25)]
    assert emission_delays(reference, written) == pytest.approx([1.25, 1.25, 0.75])


def test_unit_latency_by_hand() -> None:
    latency = unit_latency([10.0] * 99 + [1000.5])
    assert (latency.units, latency.misses, latency.p50, latency.max) == (100, 1, 10.0, 1000.5)
    assert latency.mean == pytest.approx(19.905)
    assert latency.p99 == pytest.approx(10.0 + 0.01 * 990.5)
    assert unit_latency([1000.0]).misses == 0
    with pytest.raises(ValueError, match="no unit"):
        unit_latency([])
    with pytest.raises(ValueError, match="not negative"):
        unit_latency([1.0, float("nan"), -2.0])
