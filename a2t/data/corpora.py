"""Corpora as others publish them: LibriSpeech's folders, its parquet form on the hub, any folder of audio and text.

    folders   <split>/<speaker>/<chapter>/<speaker>-<chapter>-0000.flac beside <speaker>-<chapter>.trans.txt,
              a line an utterance: ID TEXT
    rows      columns id, audio {bytes, path}, text, speaker_id, as openslr/librispeech_asr has them; the split is
              the file's folder (train.clean.100/0000.parquet) or the start of its name (test-00000-of-00002.parquet)
    pairs     x.wav (flac, ogg ...) and x.txt beside it; the folder's name is the speaker

`find` looks what is there; it cuts the corpus into parts that any machine can `read` alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

import pyarrow.parquet as pq

from a2t.data.places import Place, file_system, files_below

Form = Literal["folders", "rows", "pairs"]
AUDIO = (".flac", ".wav", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au", ".w64")


@dataclass(frozen=True)
class Utterance:
    """`audio`: a path of the place's file system, or the file's bytes; `text` None: there is none."""

    id: str
    speaker: str
    split: str
    text: str | None
    audio: str | bytes | None
    problem: str | None = None  # a kind of findings.LEFT_OUT
    suffix: str = ""  # of the file that `audio` holds the bytes of


@dataclass(frozen=True)
class Piece:
    """What one part reads. `ids` are the utterances that it should have, as far as the listing tells.

    `files` by form: folders: (transcript or "", audio...) a chapter; pairs: (audio, text or ""); rows: (file, row
    group).
    """

    place: Place
    form: Form
    split: str
    files: tuple[tuple[Any, ...], ...]
    ids: tuple[str, ...]
    size: int  # bytes of the files: others of the same names are another piece

    def read(self) -> Iterator[Utterance]:
        return {"folders": _read_folders, "rows": _read_rows, "pairs": _read_pairs}[self.form](self)


@dataclass
class _Open:
    """A piece that still grows."""

    files: list[tuple[Any, ...]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    size: int = 0


def find_corpus(place: Place, split: str = "train", at_once: int = 512) -> list[Piece]:
    """Pieces of about `at_once` utterances, none of two splits. `split`: of files that do not tell theirs.

    Raises ValueError if there is no audio.
    """
    files = files_below(place)
    if any(path.endswith(".trans.txt") for path in files):
        form: Form = "folders"
        found = _chapters(files, split)
    elif any(path.endswith(".parquet") for path in files):
        form = "rows"
        found = _row_groups(place, files, split)
    else:
        form = "pairs"
        found = _pairs(place, files, split)
    pieces: list[Piece] = []
    growing: dict[str, _Open] = {}

    def close(of: str) -> None:
        piece = growing.pop(of)
        pieces.append(Piece(place, form, of, tuple(piece.files), tuple(piece.ids), piece.size))

    for of, entry, ids, size in found:
        piece = growing.setdefault(of, _Open())
        piece.files.append(entry)
        piece.ids += ids
        piece.size += size
        if len(piece.ids) >= at_once:
            close(of)
    for of in list(growing):
        close(of)
    if not any(piece.ids for piece in pieces):
        raise ValueError(f"{place.given} holds no audio: folders of LibriSpeech, parquet, or audio files are needed")
    return pieces


Entry = tuple[str, tuple[Any, ...], list[str], int]
"""Split, what a piece keeps of it, ids, bytes."""


def _chapters(files: Mapping[str, int], split: str) -> Iterator[Entry]:
    folders: dict[str, list[str]] = defaultdict(list)
    for path in files:
        if path.endswith((".trans.txt", *AUDIO)):
            folders[path.rpartition("/")[0]].append(path)
    for folder, paths in folders.items():
        transcripts = [p for p in paths if p.endswith(".trans.txt")]
        audio = [p for p in paths if not p.endswith(".trans.txt")]
        parts = folder.split("/")
        of = parts[-3] if len(parts) >= 3 and re.fullmatch(r"(train|dev|test)\W.*", parts[-3]) else split
        yield of, (tuple(transcripts), *audio), [PurePosixPath(p).stem for p in audio], sum(files[p] for p in paths)


def _read_folders(piece: Piece) -> Iterator[Utterance]:
    fs = file_system(piece.place)
    for transcripts, *paths in piece.files:
        audio = {PurePosixPath(p).stem: p for p in paths}
        texts: dict[str, str] = {}
        for transcript in transcripts:
            for line in bytes(fs.cat_file(transcript)).decode("utf-8", errors="replace").splitlines():
                name, _, text = line.strip().partition(" ")
                if name:
                    texts[name] = text
        for name in sorted({*audio, *texts}):
            speaker = name.partition("-")[0]
            yield _checked(name, speaker, piece.split, texts.get(name), audio.get(name))


def _row_groups(place: Place, files: Mapping[str, int], split: str) -> Iterator[Entry]:
    for path, size in files.items():
        if not path.endswith(".parquet"):
            continue
        name = re.match(r"(.+)-\d+-of-\d+\.parquet", PurePosixPath(path).name)
        folder = PurePosixPath(path).parent.name
        of = name[1] if name else folder if path.rpartition("/")[0] != place.path else split
        with file_system(place).open(path, "rb") as file:
            table = pq.ParquetFile(file)
            if missing := {"id", "audio", "text"} - set(table.schema_arrow.names):
                raise ValueError(f"{path} has no column {', '.join(sorted(missing))}: it holds no corpus")
            for group in range(table.num_row_groups):
                ids = table.read_row_group(group, ["id"]).column("id").to_pylist()
                yield of, (path, group), ids, size


def _read_rows(piece: Piece) -> Iterator[Utterance]:
    for path, group in piece.files:
        with file_system(piece.place).open(path, "rb") as file:
            table = pq.ParquetFile(file)
            columns = {"id", "audio", "text", "speaker_id"} & set(table.schema_arrow.names)
            for line in table.read_row_group(group, sorted(columns)).to_pylist():
                audio = line["audio"] or {}
                suffix = PurePosixPath(audio.get("path") or "").suffix or ".flac"
                speaker = "" if line.get("speaker_id") is None else str(line["speaker_id"])
                yield _checked(line["id"], speaker, piece.split, line["text"], audio.get("bytes"), suffix)


def _pairs(place: Place, files: Mapping[str, int], split: str) -> Iterator[Entry]:
    texts = {path.removesuffix(".txt"): path for path in files if path.endswith(".txt")}
    for path in files:
        stem, dot, suffix = path.rpartition(".")
        if dot and f".{suffix.lower()}" in AUDIO:
            text = texts.pop(stem, "")
            yield split, (path, text), [_below(place, stem)], files[path] + files.get(text, 0)
    for stem, text in texts.items():
        yield split, ("", text), [_below(place, stem)], files[text]


def _read_pairs(piece: Piece) -> Iterator[Utterance]:
    fs = file_system(piece.place)
    for audio, text_file in piece.files:
        name = _below(piece.place, (audio or text_file).rpartition(".")[0])
        speaker = PurePosixPath(name).parent.name
        text = None
        if text_file:
            try:
                text = bytes(fs.cat_file(text_file)).decode("utf-8-sig")
            except UnicodeDecodeError:
                yield Utterance(name, speaker, piece.split, None, audio or None, "unreadable text")
                continue
        yield _checked(name, speaker, piece.split, text, audio or None)


def _below(place: Place, path: str) -> str:
    return path[len(place.path) :].strip("/")


def _checked(
    name: str, speaker: str, split: str, text: str | None, audio: str | bytes | None, suffix: str = ""
) -> Utterance:
    problem = None if audio else "no audio"
    if problem is None:
        problem = "unreadable text" if text and "�" in text else None if text and text.strip() else "no text"
    return Utterance(name, speaker, split, text, audio, problem, suffix)
