"""Every word goes to exactly one unit, the one that DESIGN.md section 5 names."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2t.data.alignment import unit_of, words_to_units
from a2t.data.manifest import Word

# milliseconds, so that exact rational arithmetic can say where a word belongs
milliseconds = st.integers(0, 60_000)


def ceil(x: Fraction) -> int:
    return -(-x.numerator // x.denominator)


@given(end=milliseconds, delta=st.integers(0, 3000), unit=st.sampled_from([500, 1000, 1035, 2000]))
def test_a_word_goes_to_the_unit_of_the_formula_in_exact_arithmetic(end, delta, unit):
    number = max(1, ceil(Fraction(end + delta, unit)))
    assert unit_of(end / 1000, delta / 1000, unit / 1000) == number - 1


@given(ends=st.lists(milliseconds, max_size=40), units=st.integers(1, 70), delta=st.integers(0, 2500))
def test_every_word_lies_in_exactly_one_segment_or_is_reported(ends, units, delta):
    words = [Word(f"w{i}", max(0, e - 100) / 1000, e / 1000) for i, e in enumerate(ends)]
    out = words_to_units(words, units, delta=delta / 1000)
    placed = [w for segment in out.segments for w in segment]
    assert sorted(w.word for w in [*placed, *out.past_end]) == sorted(w.word for w in words)
    for index, segment in enumerate(out.segments):
        assert [words.index(w) for w in segment] == sorted(words.index(w) for w in segment)
        for w in segment:  # heard out, and not a unit later than needed
            assert w.end + delta / 1000 <= index + 1 + 1e-6
            assert index == 0 or w.end + delta / 1000 > index - 1e-6
    assert all(w.end > units - 1e-6 for w in out.past_end), "a word inside the audio was refused"
    assert out.audio_units == units <= len(out.segments)
    assert out.trailing_units == 0 or out.segments[-1], "a trailing unit without a word"


def test_examples():
    words = [Word("a", 0.1, 0.5), Word("b", 0.5, 0.51), Word("c", 1.2, 1.5), Word("d", 2.0, 2.9), Word("e", 9.0, 9.5)]
    out = words_to_units(words, 3)
    assert [[w.word for w in s] for s in out.segments] == [["a"], ["b", "c"], [], ["d"]]
    assert out.trailing_units == 1 and [w.word for w in out.past_end] == ["e"]
    assert [w.word for w in words_to_units(words, 3, trailing=0).past_end] == ["d", "e"]


def test_no_words_and_audio_shorter_than_a_unit():
    assert words_to_units([], 1).segments == ((),)
    assert words_to_units([Word("a", 0.0, 0.2)], 1).segments == ((Word("a", 0.0, 0.2),),)
    late = words_to_units([Word("a", 0.3, 0.6)], 1)
    assert late.segments == ((), (Word("a", 0.3, 0.6),)) and late.trailing_units == 1


def test_refused_arguments():
    with pytest.raises(ValueError, match="units 0"):
        words_to_units([], 0)
    with pytest.raises(ValueError, match="delta -1"):
        words_to_units([], 1, delta=-1)
