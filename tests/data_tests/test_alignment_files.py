"""The three published forms say the same of the same utterances; what breaks its form is told, not lost."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from praatio import textgrid

from a2t.data.alignment_files import AlignmentFiles, parse_condensed, parse_textgrid
from a2t.data.places import Place
from a2t.data.word_times import Interval

DATA = Path(__file__).parents[1] / "data" / "librispeech"
IDS = ["19-198-0000", "19-198-0001", "26-495-0000"]


def load(folder: Path) -> dict:
    return AlignmentFiles.find(Place.of(folder)).of([*IDS, "19-198-0002"]).load()


def spoken(intervals: list[Interval]) -> list[tuple[str, float, float]]:
    return [(i.label.lower(), i.start, i.end) for i in intervals if i.label]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows in the form of gilkeyio/librispeech-alignments, two row groups."""
    folder = tmp_path_factory.mktemp("rows")
    found = load(DATA / "textgrids")
    lines = [
        {"id": i, "words": [{"word": w, "start": a, "end": b} for w, a, b in spoken(found[i])], "transcript": "x"}
        for i in IDS
    ]
    pq.write_table(pa.Table.from_pylist(lines), folder / "train_clean_100-00000-of-00001.parquet", row_group_size=2)
    return folder


def test_all_forms_agree(rows):
    grids, condensed, table = load(DATA / "textgrids"), load(DATA / "condensed"), load(rows)
    assert sorted(grids) == sorted(condensed) == sorted(table) == IDS
    assert [w for w, *_ in spoken(grids["19-198-0001"])] == ["my", "brother's", "<unk>"]
    for i in IDS:
        assert spoken(grids[i]) == spoken(condensed[i]) == spoken(table[i])
        last = textgrid.openTextgrid(str(next(DATA.rglob(f"{i}.TextGrid"))), includeEmptyIntervals=True)
        assert spoken(grids[i]) == [(e.label, e.start, e.end) for e in last.getTier("words").entries if e.label]


def test_only_what_a_part_needs_is_read(rows):
    found = AlignmentFiles.find(Place.of(rows))
    assert {g for _, g in found.rows.values()} == {0, 1}
    assert list(found.of(["26-495-0000"]).load()) == ["26-495-0000"]
    assert list(found.unused({"19-198-0000", "26-495-0000"})) == ["19-198-0001"]
    condensed = AlignmentFiles.find(Place.of(DATA / "condensed"))
    assert list(condensed.unused({"19-198-0000"})) == ["26-495"]


def test_broken_ones_are_told():
    found = parse_condensed(
        'a-b-0 ",A," "0.1,0.2,0.3"\na-b-1 ",A" "0.1,x"\na-b-2 ",A" "0.1"\n\nrubbish\na-b-3 "A" "0.4"\n'
    )
    assert [i.label for i in found["a-b-0"]] == ["", "A", ""]
    assert "could not convert" in found["a-b-1"] and found["a-b-2"] == "2 words but 1 times"
    assert "line 5" in found["rubbish"] and found["a-b-3"] == [Interval("A", 0.0, 0.4)]
    whole = next(DATA.rglob("*.TextGrid")).read_text()
    with pytest.raises(ValueError, match='no tier "words"'):
        parse_textgrid(whole.replace('"words"', '"mots"'))
    for broken in ("", "File type", *(whole[:n] for n in range(0, whole.index("item [2]"), 60))):
        with pytest.raises(ValueError):
            parse_textgrid(broken)


def test_a_folder_without_alignments(tmp_path):
    with pytest.raises(ValueError, match="holds no file"):
        AlignmentFiles.find(Place.of(tmp_path))
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ValueError, match="holds no TextGrid"):
        AlignmentFiles.find(Place.of(tmp_path))
    pq.write_table(pa.table({"id": ["a"], "text": ["b"]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="no column words"):
        AlignmentFiles.find(Place.of(tmp_path))
