"""A manifest reads back what was written, and says file and line where it cannot."""

import json
import math

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2t.data.manifest import Manifest, Row, Turn, Word
from a2t.data.tables import table_of

GOOD = Row(
    id="s1-1",
    audio="audio/s1-1.flac",
    duration=3.25,
    speaker="s1",
    split="train",
    words=(Word("the", 0.1, 0.2), Word("key", 0.2, 0.6)),
    turns=(Turn("question", 0.1, 0.6, "the key", "in the hall", {"fact": ["key", "hall"]}), Turn("pause", 0.6, 1.0)),
    native=(("<|listen|>",), ("<|speak|>", "in", "the", 7)),
    extra={"snr_db": 20},
)


def test_round_trip_through_a_file(tmp_path):
    rows = [GOOD, Row("x", "/abs/x.wav", 1, "s2", "test")]
    assert Manifest.write(tmp_path / "sub" / "m.jsonl", rows) == 2
    assert Manifest.read(tmp_path / "sub" / "m.jsonl") == rows
    assert Manifest.read(tmp_path / "sub" / "m.jsonl", split="test") == rows[1:]
    assert Manifest.audio_path(tmp_path / "m.jsonl", GOOD) == str(tmp_path / "audio/s1-1.flac")
    assert Manifest.audio_path(tmp_path / "m.jsonl", rows[1]) == "/abs/x.wav"


def test_a_parquet_manifest_says_the_same(tmp_path):
    rows = [GOOD, Row("x", "/abs/x.wav", 1, "s2", "test")]
    Manifest.write(tmp_path / "m.jsonl", rows)
    path = tmp_path / "m.parquet"
    pq.write_table(table_of(rows), path)
    assert Manifest.read(path) == Manifest.read(tmp_path / "m.jsonl") == rows
    assert Manifest.read(path.as_uri()) == Manifest.read((tmp_path / "m.jsonl").as_uri()) == rows
    assert Manifest.read(path, split="test") == rows[1:]
    assert Manifest.audio_path("s3://bucket/set/m.parquet", GOOD) == "s3://bucket/set/audio/s1-1.flac"
    pq.write_table(table_of([rows[1], rows[1]]), path)
    with pytest.raises(ValueError, match=r"m.parquet:2: id 'x' was already used in line 1"):
        Manifest.read(path)
    with pytest.raises(ValueError, match="choose a name such as manifest.jsonl"):
        Manifest.write(path, rows)


text = st.text(min_size=1, max_size=8).filter(lambda s: s == s.strip())
times = st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)).map(sorted)
words = st.builds(lambda w, t: Word(w, *t), text, times)
turns = st.builds(
    lambda k, t, s, a: Turn(k, *t, s, a), text, times, st.text(max_size=8), st.none() | st.text(max_size=5)
)


@given(words=st.lists(words, max_size=4), turns=st.lists(turns, max_size=3), name=text, seconds=st.floats(1e-3, 1e5))
def test_any_row_survives_json(words, turns, name, seconds):
    row = Row(name, "a.wav", seconds, "", "train", tuple(words), tuple(turns))
    assert Row.from_json(json.loads(json.dumps(row.to_json(), allow_nan=False))) == row


BAD = [
    ("{", "Expecting"),
    ("[]", "not a JSON object"),
    ({"speaker": None}, "speaker is None"),
    ({"duration": 0}, "duration 0.0 is not a positive"),
    ({"duration": "3"}, "duration is '3', not float"),
    ({"duration": True}, "duration is True, not float"),
    ({"words": [{"word": "a", "start": 2, "end": 1}]}, "word 'a' has times 2.0 to 1.0"),
    ({"words": [{"word": " a", "start": 0, "end": 1}]}, "spaces around"),
    ({"words": [{"word": "a", "start": 0}]}, "word lacks end"),
    ({"turns": [{"kind": "x", "start": 0, "end": 1, "fact": 1}]}, "unknown fields fact; free-form values belong"),
    ({"native": [["a"], []]}, "native unit 1 is empty"),
    ({"native": [[1.5]]}, "not a list of token texts or ids"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m for _, m in BAD])
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, change, message):
    line = change if isinstance(change, str) else json.dumps({**Row("b", "b", 1.0, "s", "t").to_json(), **change})
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(GOOD.to_json()) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match="m.jsonl:3: ") as error:
        Manifest.read(path)
    assert message in str(error.value)


def test_doubled_ids_and_empty_splits_are_refused(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text((json.dumps(GOOD.to_json()) + "\n") * 2)
    with pytest.raises(ValueError, match=r"m.jsonl:2: id 's1-1' was already used in line 1"):
        Manifest.read(path)
    with pytest.raises(ValueError, match="used twice"):
        Manifest.write(tmp_path / "n.jsonl", [GOOD, GOOD])
    assert not (tmp_path / "n.jsonl").exists()
    Manifest.write(path, [GOOD])
    with pytest.raises(ValueError, match=r"no row of split 'dev'; it has \['train'\]"):
        Manifest.read(path, split="dev")


def test_units_of_a_duration():
    assert [Row("a", "a", d, "", "t").units() for d in (0.01, 1.0, 1.0000001, 1.01, 16)] == [1, 1, 1, 2, 16]
    with pytest.raises(ValueError):
        Row("a", "a", math.nan, "", "t")
