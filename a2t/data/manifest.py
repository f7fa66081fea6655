"""The manifest: one row an utterance or session, as JSON lines or as parquet.

The embedded world writes JSON lines, `jobs.prepare` parquet (a2t/data/tables.py); `Manifest` reads either, from a path
or a URI that fsspec knows.  A line is

    {"id": "s1-0003", "audio": "audio/s1-0003.flac", "duration": 12.4, "speaker": "s1", "split": "train",
     "words": [{"word": "the", "start": 0.31, "end": 0.42}, ...],
     "turns": [{"kind": "question", "start": 0.3, "end": 2.1, "text": "where is the key", "answer": "in the hall",
                "extra": {...}}],
     "native": [["<|listen|>"], ["<|speak|>", "in", "the", "hall", "<|turn_eos|>", "<|chunk_eos|>"], ...],
     "extra": {...}}

`audio` is relative to the manifest's folder unless it is absolute or a URI; times are seconds from the start of the
audio; `native` (optional) are the native tokens of each unit, as texts or ids, without `</unit>`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

SLACK = 1e-6
"""Seconds by which times may cross: rounding in the files that others write."""


@dataclass(frozen=True, slots=True)
class Word:
    word: str
    start: float
    end: float

    def __post_init__(self) -> None:
        if not self.word or self.word != self.word.strip():
            raise ValueError(f"word {self.word!r} is empty or has spaces around it")
        _check_span(f"word {self.word!r}", self.start, self.end)


@dataclass(frozen=True)
class Turn:
    """A stretch of the session with one purpose: a fact, question, command, pause, back-channel, interruption ..."""

    kind: str
    start: float
    end: float
    text: str = ""
    answer: str | None = None  # what the assistant is to say, None where it stays silent
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.kind:
            raise ValueError("a turn has no kind")
        _check_span(f"turn {self.kind!r}", self.start, self.end)


@dataclass(frozen=True)
class Row:
    id: str
    audio: str
    duration: float
    speaker: str
    split: str
    words: tuple[Word, ...] = ()
    turns: tuple[Turn, ...] = ()
    native: tuple[tuple[str | int, ...], ...] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("words", "turns"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.native is not None:
            object.__setattr__(self, "native", tuple(tuple(unit) for unit in self.native))
            if any(not unit for unit in self.native):
                raise ValueError(f"row {self.id!r}: native unit {[bool(u) for u in self.native].index(False)} is empty")
        for name in ("id", "audio", "split"):
            if not getattr(self, name):
                raise ValueError(f"row {self.id!r}: {name!r} is empty")
        if not (math.isfinite(self.duration) and self.duration > 0):
            raise ValueError(f"row {self.id!r}: duration {self.duration!r} is not a positive number of seconds")

    def units(self, unit_seconds: float = 1.0) -> int:
        """Units that the audio fills, the last one perhaps in part."""
        return max(1, math.ceil(self.duration / unit_seconds - SLACK))

    def to_json(self) -> dict[str, Any]:
        line: dict[str, Any] = {k: getattr(self, k) for k in ("id", "audio", "duration", "speaker", "split")}
        line["words"] = [{"word": w.word, "start": w.start, "end": w.end} for w in self.words]
        line["turns"] = [_turn_json(t) for t in self.turns]
        if self.native is not None:
            line["native"] = [list(unit) for unit in self.native]
        if self.extra:
            line["extra"] = self.extra
        return line

    @classmethod
    def from_json(cls, line: Any) -> Row:
        """Raises ValueError for a missing, unknown or mistyped field."""
        values = _take(
            line,
            "row",
            required={"id": str, "audio": str, "duration": float, "speaker": str, "split": str},
            optional={"words": list, "turns": list, "native": list, "extra": dict},
        )
        words = [_take(w, "word", {"word": str, "start": float, "end": float}, {}) for w in values.pop("words", [])]
        turns = [
            _take(t, "turn", {"kind": str, "start": float, "end": float}, {"text": str, "answer": str, "extra": dict})
            for t in values.pop("turns", [])
        ]
        for unit in values.get("native", []):
            if not isinstance(unit, list) or not all(isinstance(t, (str, int)) for t in unit):
                raise ValueError(f"native unit {unit!r} is not a list of token texts or ids")
        return cls(**values, words=tuple(Word(**w) for w in words), turns=tuple(Turn(**t) for t in turns))


class Manifest:
    """Rows in a file of JSON lines or in a parquet file. `iterate` streams: a manifest may be larger than memory."""

    @staticmethod
    def iterate(path: str | Path) -> Iterator[Row]:
        """Rows in file order. Raises ValueError naming file and line (or row) for a bad one or a doubled id."""
        seen: dict[str, int] = {}
        for number, line in _rows_of(path):
            try:
                row = Row.from_json(json.loads(line) if isinstance(line, str) else line)
            except (ValueError, TypeError) as error:  # json.JSONDecodeError is a ValueError
                raise ValueError(f"{path}:{number}: {error}") from error
            if row.id in seen:
                raise ValueError(f"{path}:{number}: id {row.id!r} was already used in line {seen[row.id]}")
            seen[row.id] = number
            yield row

    @staticmethod
    def read(path: str | Path, split: str | None = None) -> list[Row]:
        """All rows, or those of one split; ValueError as in `iterate`, also where a split has no row."""
        rows, splits = [], set()
        for row in Manifest.iterate(path):
            splits.add(row.split)
            if split is None or row.split == split:
                rows.append(row)
        if split is not None and not rows:
            raise ValueError(f"{path}: no row of split {split!r}; it has {sorted(splits)}")
        return rows

    @staticmethod
    def write(path: str | Path, rows: Iterable[Row]) -> int:
        """Writes JSON lines beside the target and renames, so that a half-written manifest is never seen. Returns the
        count; ValueError for a doubled id or a name that would be read as parquet."""
        path = Path(path)
        if path.suffix == ".parquet":
            raise ValueError(f"{path}: JSON lines are written here; choose a name such as manifest.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        seen: set[str] = set()
        with part.open("w", encoding="utf-8") as out:
            for row in rows:
                if row.id in seen:
                    raise ValueError(f"{path}: id {row.id!r} is used twice")
                seen.add(row.id)
                out.write(json.dumps(row.to_json(), ensure_ascii=False, allow_nan=False) + "\n")
        part.replace(path)
        return len(seen)

    @staticmethod
    def audio_path(manifest: str | Path, row: Row) -> str:
        """Where the row's audio is: relative paths stand beside the manifest, URIs are left alone."""
        if "://" in row.audio or Path(row.audio).is_absolute():
            return row.audio
        if "://" in str(manifest):
            return f"{str(manifest).rpartition('/')[0]}/{row.audio}"
        return str(Path(manifest).parent / row.audio)


def _rows_of(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Numbers from 1, and the line's text or the parquet row."""
    if str(path).endswith(".parquet"):
        from a2t.data.tables import iterate_table

        yield from enumerate(iterate_table(path), 1)
        return
    with fsspec.open(str(path), "rt", encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            if text.strip():
                yield number, text


def _turn_json(turn: Turn) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": turn.kind, "start": turn.start, "end": turn.end, "text": turn.text}
    if turn.answer is not None:
        out["answer"] = turn.answer
    if turn.extra:
        out["extra"] = turn.extra
    return out


def _check_span(what: str, start: float, end: float) -> None:
    if not (math.isfinite(start) and math.isfinite(end)) or start < -SLACK or end < start - SLACK:
        raise ValueError(f"{what} has times {start!r} to {end!r}; seconds with 0 <= start <= end are needed")


def _take(line: Any, what: str, required: Mapping[str, type], optional: Mapping[str, type]) -> dict[str, Any]:
    """Checks names and types of a JSON object's fields; null stands for an absent optional field."""
    if not isinstance(line, dict):
        raise ValueError(f"{what} is {line!r}, not a JSON object")  # noqa: TRY004
    if missing := [k for k in required if k not in line]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    types = {**required, **optional}
    if unknown := [k for k in line if k not in types]:
        raise ValueError(
            f"{what} has unknown fields {', '.join(map(str, unknown))}; free-form values belong in 'extra'"
        )
    out: dict[str, Any] = {}
    for key, value in line.items():
        if value is None and key in optional:
            continue
        if types[key] is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, types[key]):
            raise ValueError(f"{what}: {key} is {value!r}, not {types[key].__name__}")  # noqa: TRY004 (a file's fault)
        out[key] = value
    return out
