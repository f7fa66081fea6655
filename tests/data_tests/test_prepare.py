"""One manifest from each form of corpus and of alignments; everything that is wrong is counted; runs go on."""

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from a2t.audio.files import read_audio, write_wav
from a2t.data.manifest import Manifest, Row
from a2t.data.places import Place
from a2t.data.prepare import Preparation, out_place, summary

DATA = Path(__file__).parents[1] / "data" / "librispeech"
CORPUS, TEXTGRIDS = DATA / "corpus", DATA / "textgrids"
CHAPTER = Path("train-clean-100/19/198")


def prepare(corpus, alignments, out, **options) -> tuple[list[Row], dict]:
    config = options.pop("config", None)
    places = Place.of(corpus, config), Place.of(alignments) if alignments else None, out_place(str(out))
    plan = Preparation.plan(*places, **options)
    for part in plan.missing():
        plan.write(part)
    report = plan.finish()
    rows = Manifest.read(plan.manifest)
    assert report["utterances"] == len(rows) and report["words"] == sum(len(r.words) for r in rows)
    assert summary(report)
    return rows, report


def counts(report: dict) -> dict[str, int]:
    return {kind: found["count"] for kind, found in report["findings"].items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[Row]:
    return prepare(CORPUS, TEXTGRIDS, tmp_path_factory.mktemp("out"))[0]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """The corpus as `datasets` writes it, in the hub's layout: all/train.clean.100/0000.parquet."""
    folder = tmp_path_factory.mktemp("hub") / "all" / "train.clean.100"
    folder.mkdir(parents=True)
    lines = []
    for transcript in sorted(CORPUS.rglob("*.trans.txt")):
        for line in transcript.read_text().splitlines():
            name, _, text = line.partition(" ")
            audio = {"bytes": (transcript.parent / f"{name}.flac").read_bytes(), "path": f"{name}.flac"}
            speaker, chapter, _ = map(int, name.split("-"))
            lines.append({"file": f"{name}.flac", "audio": audio, "text": text, "id": name})
            lines[-1] |= {"speaker_id": speaker, "chapter_id": chapter}
    features = datasets.Features.from_arrow_schema(pa.Table.from_pylist(lines).schema)
    assert features.arrow_schema.field("audio").type == datasets.Audio.pa_type  # as the hub keeps audio
    datasets.Dataset.from_list(lines, features=features).to_parquet(folder / "0000.parquet", batch_size=3)
    shutil.copytree(folder, folder.parents[1] / "clean" / "train.100")  # another configuration of the same data set
    return folder.parents[1]


def test_librispeech_folders_with_each_form_of_alignment(expected, tmp_path):
    assert [r.id for r in expected] == ["19-198-0000", "19-198-0001", "26-495-0000"]
    row = expected[1]
    assert (row.speaker, row.split) == ("19", "train-clean-100")
    times = [("my", 0.1, 0.23), ("brother's", 0.23, 0.61), ("grobnik", 0.61, 1.11)]
    assert [(w.word, w.start, w.end) for w in row.words] == times
    assert row.audio == str((CORPUS / CHAPTER / "19-198-0001.flac").resolve())
    assert row.duration == soundfile.info(row.audio).duration
    rows, report = prepare(CORPUS, DATA / "condensed", tmp_path)
    assert rows == expected
    assert counts(report) == {"no alignment": 1, "unknown word": 1}
    assert report["findings"]["no alignment"]["examples"] == ["19-198-0002"]
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["splits"]["train-clean-100"]["utterances"] == 3 and report["speakers"] == 2


def test_the_hubs_rows(expected, hub, tmp_path):
    rows, report = prepare(hub, TEXTGRIDS, tmp_path / "out", config="all", at_once=2)
    assert counts(report) == {"no alignment": 1, "unknown word": 1}
    for row, other in zip(rows, expected, strict=True):
        assert (row.id, row.words, row.speaker, row.duration) == (other.id, other.words, other.speaker, other.duration)
        assert row.split == "train.clean.100" and not Path(row.audio).is_absolute()
        path = Path(Manifest.audio_path(tmp_path / "out/manifest.parquet", row))
        assert path.read_bytes() == Path(other.audio).read_bytes()
    both = prepare(hub, TEXTGRIDS, tmp_path / "both", at_once=2)[1]
    assert counts(both)["duplicate"] == 3  # without --config the data set's second copy is met, and said
    assert pq.ParquetFile(hub / "all/train.clean.100/0000.parquet").num_row_groups == 2


def test_a_folder_of_audio_and_text_aligned_here(expected, tmp_path):
    corpus = tmp_path / "corpus"
    for row in expected:
        (corpus / row.speaker).mkdir(parents=True, exist_ok=True)
        pcm_S = read_audio(row.audio)
        soundfile.write(corpus / row.speaker / f"{row.id}.ogg", pcm_S, 16000)
        (corpus / row.speaker / f"{row.id}.txt").write_text(" ".join(w.word for w in row.words).title() + ".\n")
    rows, report = prepare(corpus, None, tmp_path / "out", split="mine")
    assert counts(report) == {"spelled by rule": 1}
    for row, known in zip(rows, expected, strict=True):
        assert (row.id, row.speaker, row.split) == (f"{known.speaker}/{known.id}", known.speaker, "mine")
        said = " ".join(w.word for w in known.words).title() + "."
        assert " ".join(w.word for w in row.words) == said
        assert [w.end for w in row.words] == pytest.approx([w.end for w in known.words], abs=0.12)
    assert prepare(corpus, None, tmp_path / "again", split="mine")[0] == rows


def test_a_folder_of_audio_and_text_with_textgrids_of_the_same_paths(expected, tmp_path):
    for row, speaker in zip(expected, ("alice", "bob", "bob"), strict=True):
        name = f"{speaker}/{'1' if row.id != '26-495-0000' else '2'}"
        for folder, suffix, data in [
            ("corpus", "flac", Path(row.audio).read_bytes()),
            ("corpus", "txt", " ".join(w.word for w in row.words).encode()),
            ("grids", "TextGrid", next(TEXTGRIDS.rglob(f"{row.id}.TextGrid")).read_bytes()),
        ]:
            path = tmp_path / folder / f"{name}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    (tmp_path / "grids/bob/2.TextGrid").rename(tmp_path / "grids/2.TextGrid")  # nobody's
    rows, report = prepare(tmp_path / "corpus", tmp_path / "grids", tmp_path / "out")
    assert [(r.id, r.words) for r in rows] == [("alice/1", expected[0].words), ("bob/1", expected[1].words)]
    assert counts(report) == {"no alignment": 1, "unknown word": 1, "unused alignment": 1}


def test_everything_wrong_is_counted_and_nothing_is_lost(tmp_path):
    corpus, grids = tmp_path / "corpus", tmp_path / "grids"
    shutil.copytree(CORPUS, corpus)
    shutil.copytree(TEXTGRIDS, grids)
    chapter = corpus / CHAPTER
    good = chapter / "19-198-0000.flac"
    for n, data in enumerate([good.read_bytes()[:9000], b"", b"no audio"], 3):
        (chapter / f"19-198-000{n}.flac").write_bytes(data)
    write_wav(chapter / "19-198-0006.wav", np.zeros(0))
    for n in (7, 8):
        shutil.copy(good, chapter / f"19-198-000{n}.flac")
    write_wav(chapter / "19-198-0000.wav", np.zeros(16000))  # a second one of that id
    with (chapter / "19-198.trans.txt").open("ab") as lines:
        lines.write(b"".join(b"19-198-000%d SOME TEXT\n" % n for n in (3, 4, 5, 6, 8)) + b"19-198-0009 NO AUDIO\n")
        lines.write(b"\n26-495-0001 \xff\xfe\n")
    shutil.copy(good, chapter / "26-495-0001.flac")
    grid = next(grids.rglob("19-198-0000.TextGrid"))
    for n in (3, 4, 5, 6):
        shutil.copy(grid, grid.with_name(f"19-198-000{n}.TextGrid"))
    grid.with_name("19-198-0008.TextGrid").write_text("torn")
    shutil.copy(grid, grid.with_name("99-99-0000.TextGrid"))
    rows, report = prepare(corpus, grids, tmp_path / "out", at_once=1)
    assert [r.id for r in rows] == ["19-198-0000", "19-198-0001", "26-495-0000"]
    assert counts(report) == {
        "unreadable audio": 4,
        "no audio": 1,
        "no text": 1,
        "unreadable text": 1,
        "no alignment": 1,
        "unreadable alignment": 1,
        "unknown word": 1,
        "unused alignment": 1,
    }
    ids = {i.partition(":")[0] for kind in report["findings"].values() for i in kind["examples"]}
    assert ids >= {f"19-198-000{n}" for n in range(1, 10)} | {"26-495-0001", "99-99-0000"}


def test_silence_and_foreign_letters_are_what_the_aligner_cannot(tmp_path):
    corpus = tmp_path / "c"
    corpus.mkdir()
    write_wav(corpus / "still.wav", np.zeros(16000))
    write_wav(corpus / "noise.wav", 0.1 * np.random.default_rng(0).standard_normal(16000))
    (corpus / "still.txt").write_text("nothing")
    (corpus / "noise.txt").write_text("слово")
    (corpus / "latin1.txt").write_bytes(b"caf\xe9")
    shutil.copy(corpus / "still.wav", corpus / "latin1.wav")
    with pytest.raises(
        ValueError, match="'aligner failed': 2, 'unreadable text': 1|'unreadable text': 1, 'aligner failed': 2"
    ):
        prepare(corpus, None, tmp_path / "out")


def test_a_stopped_run_goes_on_and_a_changed_corpus_is_done_anew(expected, tmp_path):
    corpus = tmp_path / "corpus"
    shutil.copytree(CORPUS, corpus)
    places = Place.of(corpus), Place.of(TEXTGRIDS), out_place(str(tmp_path / "out"))
    plan = Preparation.plan(*places, at_once=1)
    assert len(plan.parts) == 2 == len(plan.missing())
    plan.write(plan.missing()[0])
    with pytest.raises(ValueError, match="1 of 2 parts lack"):
        plan.finish()
    assert not (tmp_path / "out/manifest.parquet").exists()
    again = Preparation.plan(*places, at_once=1)
    assert [p.number for p in again.missing()] == [1]
    again.write(again.missing()[0])
    again.finish()
    assert [r.id for r in Manifest.read(again.manifest)] == [r.id for r in expected]
    with (corpus / "train-clean-100/26/495/26-495.trans.txt").open("a") as lines:
        lines.write("26-495-0001 GONE\n")
    changed = Preparation.plan(*places, at_once=1)
    assert [p.number for p in changed.missing()] == [1]
    changed.write(changed.missing()[0])
    assert counts(changed.finish())["no audio"] == 1
    assert len(list((tmp_path / "out/parts").iterdir())) == 2


def test_places_may_be_uris(expected, hub):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(CORPUS), "/corpus", recursive=True)
    memory.put(str(TEXTGRIDS), "/grids", recursive=True)
    rows, _ = prepare("memory://corpus", "memory://grids", "memory://out")
    assert [(r.id, r.words) for r in rows] == [(r.id, r.words) for r in expected]
    assert rows[0].audio == "memory:///corpus/train-clean-100/19/198/19-198-0000.flac".replace(":///", "://")
    with fsspec.open(rows[0].audio, "rb") as file:
        assert file.read() == Path(expected[0].audio).read_bytes()
    memory.put(str(hub / "all"), "/hub/all", recursive=True)
    rows, _ = prepare("memory://hub", "memory://grids", "memory://hubout")
    with fsspec.open(Manifest.audio_path("memory://hubout/manifest.parquet", rows[0]), "rb") as file:
        assert file.read() == Path(expected[0].audio).read_bytes()


def test_what_a_user_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"no such folder; a URI \(s3://...\) or a hub name"):
        Place.of(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no file"):
        prepare(tmp_path, TEXTGRIDS, tmp_path / "out")
    assert Place.of("openslr/librispeech_asr", "all").root == "hf://datasets/openslr/librispeech_asr"
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(ValueError, match="holds no audio"):
        prepare(tmp_path, TEXTGRIDS, tmp_path / "out")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="no column audio, id, text"):
        prepare(tmp_path, TEXTGRIDS, tmp_path / "out")
    with pytest.raises(ValueError, match="has no column id"):
        Manifest.read(tmp_path / "x.parquet")
    (tmp_path / "y.parquet").write_text("x")
    with pytest.raises(ValueError, match="not a parquet file"):
        Manifest.read(tmp_path / "y.parquet")
