"""A text and its alignment become words: none lost, times that can be, and every mending counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2t.data.findings import Findings
from a2t.data.word_times import Interval, key, words_of

CASES = [
    # what, text, intervals, seconds, words with times, findings
    (
        "capitals become lower case, silences leave no word",
        "THE KEY",
        [("", 0, 0.5), ("the", 0.5, 0.7), ("", 0.7, 0.7), ("key", 0.7, 1)],
        1.0,
        [("the", 0.5, 0.7), ("key", 0.7, 1.0)],
        {"empty silence": 1},
    ),
    (
        "punctuation stays with its word",
        "The key, please!",
        [("the", 0, 1), ("key", 1, 2), ("please", 2, 3)],
        3.0,
        [("The", 0, 1), ("key,", 1, 2), ("please!", 2, 3)],
        {},
    ),
    (
        "an unknown word is the text's",
        "a grobnik here",
        [("a", 0, 1), ("<unk>", 1, 2), ("here", 2, 3)],
        3.0,
        [("a", 0, 1), ("grobnik", 1, 2), ("here", 2, 3)],
        {"unknown word": 1},
    ),
    (
        "another spelling is the text's",
        "a colour here",
        [("a", 0, 1), ("color", 1, 2), ("here", 2, 3)],
        3.0,
        [("a", 0, 1), ("colour", 1, 2), ("here", 2, 3)],
        {"other spelling": 1},
    ),
    (
        "two words for one share its time by letters",
        "an every day thing",
        [("an", 0, 1), ("everyday", 1, 2), ("thing", 2, 3)],
        3.0,
        [("an", 0, 1), ("every", 1, 1.625), ("day", 1.625, 2), ("thing", 2, 3)],
        {"other spelling": 2},
    ),
    (
        "a word that the alignment lacks gets the gap",
        "the red key",
        [("the", 0, 1), ("key", 2, 3)],
        3.0,
        [("the", 0, 1), ("red", 1, 2), ("key", 2, 3)],
        {"word not aligned": 1},
    ),
    (
        "at the start and at the end too",
        "the red key",
        [("red", 1, 2)],
        3.0,
        [("the", 0, 1), ("red", 1, 2), ("key", 2, 3)],
        {"word not aligned": 2},
    ),
    (
        "a word that the text lacks",
        "the key",
        [("the", 0, 1), ("red", 1, 2), ("key", 2, 3)],
        3.0,
        [("the", 0, 1), ("key", 2, 3)],
        {"word not in text": 1},
    ),
    (
        "a dash is no word",
        "the — key",
        [("the", 0, 1), ("key", 1, 2)],
        2.0,
        [("the", 0, 1), ("key", 1, 2)],
        {"no letters": 1},
    ),
    (
        "past the end",
        "the key",
        [("the", 0, 1), ("key", 1, 2)],
        1.5,
        [("the", 0, 1), ("key", 1, 1.5)],
        {"past the end": 1},
    ),
    (
        "wholly past it",
        "the key",
        [("the", 0, 1), ("key", 2, 3)],
        1.5,
        [("the", 0, 1), ("key", 1.5, 1.5)],
        {"past the end": 1},
    ),
    (
        "before the start",
        "the key",
        [("the", -1, 1), ("key", 1, 2)],
        2.0,
        [("the", 0, 1), ("key", 1, 2)],
        {"before the start": 1},
    ),
    ("overlap", "the key", [("the", 0, 1), ("key", 0.8, 2)], 2.0, [("the", 0, 1), ("key", 1, 2)], {"overlap": 1}),
    (
        "one within another keeps the later end",
        "the key is",
        [("the", 0, 1), ("key", 0.2, 0.5), ("is", 1, 2)],
        2.0,
        [("the", 0, 1), ("key", 1, 1), ("is", 1, 2)],
        {"overlap": 1},
    ),
    (
        "out of order",
        "the red key",
        [("the", 0, 1), ("key", 2, 3), ("red", 1, 2)],
        3.0,
        [("the", 0, 1), ("red", 1, 2), ("key", 2, 3)],
        {"out of order": 1},
    ),
    (
        "no duration",
        "the key",
        [("the", 0, 0), ("key", 1, 0.5)],
        2.0,
        [("the", 0, 0), ("key", 1, 1)],
        {"no duration": 2},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
def test_each_kind(case):
    _, text, intervals, seconds, words, found = case
    findings = Findings()
    out = words_of(text, [Interval(w, float(a), float(b)) for w, a, b in intervals], seconds, "u", findings)
    assert [(w.word, w.start, w.end) for w in out] == words
    assert dict(findings.counts) == found


vocabulary = st.sampled_from(["the", "red", "key", "Is", "here,", "—", "it's"])
labels = st.sampled_from(["", "the", "red", "key", "is", "here", "it's", "<unk>", "sil"])
seconds = st.floats(-1, 12, allow_nan=False)


@given(
    text=st.lists(vocabulary, max_size=8).map(" ".join),
    intervals=st.lists(st.builds(Interval, labels, seconds, seconds), max_size=10),
    duration=st.floats(0.1, 10),
)
def test_whatever_comes_all_words_of_the_text_stand_in_order_within_the_audio(text, intervals, duration):
    out = words_of(text, intervals, duration, "u", Findings())
    assert [w.word for w in out] == [w for w in text.split() if key(w)]
    times = [t for w in out for t in (w.start, w.end)]
    assert times == sorted(times)
    assert all(0 <= t <= duration for t in times)


def test_findings_add_up_and_name_every_utterance_left_out():
    a, b = Findings(), Findings()
    for n in range(9):
        a.note("overlap", f"u{n}")
        b.note("no text", f"u{n}")
    b.note("overlap", "v", 3)
    a.add(Findings.from_json(b.to_json()))
    assert (a.counts["overlap"], a.counts["no text"], a.left_out) == (12, 9, 9)
    assert len(a.examples["overlap"]) == 5 and len(a.examples["no text"]) == 9
    assert Findings.from_json(a.to_json()) == a
