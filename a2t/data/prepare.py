"""From a corpus and its alignments to one manifest, part by part.

    OUT/parts/00012-1f0c9e72.parquet   the rows of one part, with its findings in the file's metadata
    OUT/audio/<split>/<id>.flac        audio that came inside parquet, as it was
    OUT/manifest.parquet               all rows; written when no part is missing
    OUT/report.json                    what is in it and what was found

A part is there whole or not at all, and its name holds a hash of what it was made from: a run that was stopped goes on
with the parts that lack, and a corpus or options that changed make other parts.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import soundfile

from a2t.audio.files import Mono16k
from a2t.data.aligner import Aligner
from a2t.data.alignment_files import AlignmentFiles, Loaded
from a2t.data.corpora import Piece, Utterance, find_corpus
from a2t.data.findings import LEFT_OUT, Findings
from a2t.data.manifest import Row
from a2t.data.places import Place, file_system, write_whole
from a2t.data.tables import SCHEMA, iterate_table, table_of
from a2t.data.word_times import words_of

FORMAT = 1
"""Part of every hash: to be raised when the same input is to give other rows."""
_FINDINGS = b"a2t.findings"


@dataclass(frozen=True)
class Part:
    """`alignments` None: aligned here, from the audio."""

    number: int
    piece: Piece
    alignments: AlignmentFiles | None

    @cached_property
    def name(self) -> str:
        made_from = [FORMAT, self.number, repr(self.piece), repr(self.alignments)]
        return f"{self.number:05d}-{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:12]}.parquet"


@dataclass(frozen=True)
class Preparation:
    """What is to be done; the same on every machine that can open its places."""

    out: Place
    parts: tuple[Part, ...]
    unused: tuple[str, ...] = ()  # alignments without an utterance

    @classmethod
    def plan(
        cls, corpus: Place, alignments: Place | None, out: Place, split: str = "train", at_once: int = 512
    ) -> Preparation:
        """Looks at names and ids only. ValueError where a place holds nothing of use."""
        pieces = find_corpus(corpus, split, at_once)
        if alignments is None:
            return cls(out, tuple(Part(n, piece, None) for n, piece in enumerate(pieces)))
        found = AlignmentFiles.find(alignments)
        parts = tuple(Part(n, piece, found.of(piece.ids)) for n, piece in enumerate(pieces))
        return cls(out, parts, tuple(found.unused({i for piece in pieces for i in piece.ids})))

    def path(self, part: Part) -> str:
        return f"{self.out.path}/parts/{part.name}"

    @property
    def manifest(self) -> str:
        return self.out.uri(f"{self.out.path}/manifest.parquet")

    def missing(self) -> list[Part]:
        fs, folder = file_system(self.out), f"{self.out.path}/parts"
        there = {name.rpartition("/")[2] for name in fs.ls(folder, detail=False)} if fs.isdir(folder) else set()
        return [part for part in self.parts if part.name not in there]

    def write(self, part: Part) -> int:
        """Makes one part; returns its rows. ValueError where the corpus cannot be read as what it is taken for."""
        findings = Findings()
        loaded = {} if part.alignments is None else part.alignments.load()
        rows = []
        for utterance in part.piece.read():
            try:
                rows.append(self._row(utterance, part, loaded, findings))
            except LeftOut as left:
                findings.note(left.kind, f"{utterance.id}: {left.why}" if left.why else utterance.id)
        about = {_FINDINGS: json.dumps(findings.to_json()).encode()}
        sink = io.BytesIO()
        pq.write_table(table_of(rows).replace_schema_metadata(about), sink)
        write_whole(self.out, self.path(part), sink.getvalue())
        return len(rows)

    def finish(self) -> dict[str, Any]:
        """Puts the parts together and forgets those of other plans; returns the report. ValueError if parts lack or no
        row is left."""
        if missing := self.missing():
            raise ValueError(f"{len(missing)} of {len(self.parts)} parts lack; run it again")
        fs = file_system(self.out)
        findings, sums = Findings(), _Sums()
        for name in self.unused:
            findings.note("unused alignment", name)
        target = f"{self.out.path}/manifest.parquet"
        unfinished = target + ".part"
        with fs.open(unfinished, "wb") as sink, pq.ParquetWriter(sink, SCHEMA) as writer:
            for part in self.parts:
                with fs.open(self.path(part), "rb") as file:
                    about = pq.ParquetFile(file).schema_arrow.metadata
                findings.add(Findings.from_json(json.loads(about[_FINDINGS])))
                rows = [Row.from_json(line) for line in iterate_table(self.out.uri(self.path(part)))]
                writer.write_table(table_of([row for row in rows if sums.take(row, findings)]))
        if not sums.rows:
            raise ValueError(f"no utterance is left: {dict(findings.counts)}")
        fs.mv(unfinished, target)
        ours = {part.name for part in self.parts}
        for path in fs.ls(f"{self.out.path}/parts", detail=False):
            if path.rpartition("/")[2] not in ours:
                fs.rm(path)
        report = {**sums.to_json(), "findings": findings.to_json()}
        write_whole(self.out, f"{self.out.path}/report.json", (json.dumps(report, indent=1) + "\n").encode())
        return report

    def _row(self, u: Utterance, part: Part, loaded: Loaded, findings: Findings) -> Row:
        """LeftOut if the manifest cannot have it."""
        if u.problem is not None:
            raise LeftOut(u.problem)
        assert u.audio is not None and u.text is not None
        here = part.alignments is None
        found = [] if here else loaded.get(u.id)
        if found is None:
            raise LeftOut("no alignment")
        if isinstance(found, str):
            raise LeftOut("unreadable alignment", found)
        seconds, pcm_S = _hear(part.piece.place, u.audio, keep=here)
        intervals = _aligner().align(pcm_S, u.text.split(), u.id, findings) if here else found
        if intervals is None:
            raise LeftOut("aligner failed")
        words = words_of(u.text, intervals, seconds, u.id, findings)
        return Row(u.id, self._reference(u, part), seconds, u.speaker, u.split, words)

    def _reference(self, u: Utterance, part: Part) -> str:
        """Where the manifest says that the audio is. Bytes are written out, apart from those of other parts: two
        utterances may have one id."""
        if isinstance(u.audio, str):
            return part.piece.place.uri(u.audio)
        assert u.audio is not None
        name = f"audio/{u.split}/{part.number:05d}/{u.id}{u.suffix}"
        write_whole(self.out, f"{self.out.path}/{name}", u.audio)
        return name


class LeftOut(Exception):
    """An utterance that the manifest cannot have: a kind of findings.LEFT_OUT, and what more there is to say."""

    def __init__(self, kind: str, why: str = "") -> None:
        super().__init__(kind, why)
        self.kind, self.why = kind, why


class _Sums:
    """What a manifest holds."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.rows = self.words = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.utterances: Counter[str] = Counter()
        self.speakers: set[str] = set()

    def take(self, row: Row, findings: Findings) -> bool:
        """False for a doubled one."""
        if row.id in self.ids:
            findings.note("duplicate", f"{row.id}: {row.audio}")
            return False
        self.ids.add(row.id)
        self.rows += 1
        self.words += len(row.words)
        self.seconds[row.split] += row.duration
        self.utterances[row.split] += 1
        self.speakers.add(row.speaker)
        return True

    def to_json(self) -> dict[str, Any]:
        splits = {
            split: {"utterances": self.utterances[split], "hours": round(seconds / 3600, 4)}
            for split, seconds in sorted(self.seconds.items())
        }
        about = {"utterances": self.rows, "words": self.words, "hours": round(sum(self.seconds.values()) / 3600, 4)}
        return {**about, "speakers": len(self.speakers), "splits": splits}


def _hear(place: Place, audio: str | bytes, keep: bool) -> tuple[float, np.ndarray]:
    """Seconds, and with `keep` 16 kHz samples. All is decoded, since a header says little; LeftOut if it breaks off
    or holds nothing."""
    try:
        opened = io.BytesIO(audio) if isinstance(audio, bytes) else file_system(place).open(audio, "rb")
        with opened as file, soundfile.SoundFile(file) as sound:
            convert, held, frames = Mono16k(sound.samplerate), [], 0
            for block in sound.blocks(sound.samplerate, dtype="float32", always_2d=True):
                frames += len(block)
                pcm_S = convert.push(block)  # it refuses what are no samples
                held += [pcm_S] if keep else []
            if frames < sound.frames:
                raise ValueError(f"cut off after {frames} of {sound.frames} frames")
            held += [convert.finish()] if keep else []
            if not frames:
                raise ValueError("no sample in it")
            return frames / sound.samplerate, np.concatenate(held) if keep else np.zeros(0, np.float32)
    except (soundfile.LibsndfileError, OSError, ValueError) as error:
        raise LeftOut("unreadable audio", str(error).partition("\n")[0]) from error


@lru_cache(maxsize=1)
def _aligner() -> Aligner:
    return Aligner()


def summary(report: dict[str, Any]) -> Sequence[str]:
    """The report in lines for people."""
    lines = [
        f"{report['utterances']:,} utterances, {report['words']:,} words, {report['hours']:.2f} hours, "
        f"{report['speakers']:,} speakers"
    ]
    lines += [f"  {s}: {a['utterances']:,} utterances, {a['hours']:.2f} hours" for s, a in report["splits"].items()]
    found = report["findings"]
    for title, kinds in (("left out", LEFT_OUT), ("mended or told", found.keys() - LEFT_OUT.keys())):
        lines += [f"{title}:"] if any(k in found for k in kinds) else []
        for kind in (k for k in found if k in kinds):
            examples = "; ".join(found[kind]["examples"][:2])
            lines.append(f"  {found[kind]['count']:,} {kind}: {found[kind]['means']}  ({examples})")
    return lines


def out_place(given: str) -> Place:
    """The folder is made if need be."""
    fs, path = fsspec.core.url_to_fs(given)
    fs.makedirs(path, exist_ok=True)
    return Place.of(given)
