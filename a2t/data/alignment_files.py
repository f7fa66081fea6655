"""Alignments as others publish them: MFA's TextGrids, condensed `.alignment.txt` files, rows of a parquet data set.

    TextGrid      one file an utterance, named by its id; tier "words"
    condensed     `<speaker>-<chapter>.alignment.txt`, a line an utterance:  ID ",W1,,W2," "t0,t1,t2,t3,t4"
                  (the times are ends; an empty word is a silence)
    rows          columns `id` and `words` (list of {word, start, end}), as gilkeyio/librispeech-alignments has them

`find` looks where they are without reading them; `load` reads what one part of a corpus needs, on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import pyarrow.parquet as pq
from praatio.utilities import errors, textgrid_io

from a2t.data.places import Place, file_system, files_below
from a2t.data.word_times import Interval

Loaded = dict[str, list[Interval] | str]
"""Alignments by utterance; a text instead says what is wrong with one."""

_LINE = re.compile(r'(\S+) "([^"]*)" "([^"]*)"\s*')


@dataclass(frozen=True)
class AlignmentFiles:
    """What lies below a place. `textgrids`: by path below it, or, once chosen for a part, by utterance; `condensed`: by
    chapter; `rows`: (file, row group) by utterance."""

    place: Place
    textgrids: dict[str, str] = field(default_factory=dict)
    condensed: dict[str, str] = field(default_factory=dict)
    rows: dict[str, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def find(cls, place: Place) -> AlignmentFiles:
        """ValueError if there is no alignment of a known form."""
        found = cls(place)
        for path in files_below(place):
            name = PurePosixPath(path).name
            if name.lower().endswith(".textgrid"):
                found.textgrids[path[len(place.path) : -len(".textgrid")].strip("/")] = path
            elif name.endswith(".alignment.txt"):
                found.condensed[name.removesuffix(".alignment.txt")] = path
            elif name.endswith(".parquet"):
                found.rows.update(_index(place, path))
        if not (found.textgrids or found.condensed or found.rows):
            raise ValueError(f"{place.given} holds no TextGrid, no .alignment.txt and no parquet with alignments")
        return found

    def of(self, ids: Iterable[str]) -> AlignmentFiles:
        """Only what these utterances need. A TextGrid belongs to the utterance of its name, or, where utterances are
        named by their own paths, of its path."""
        ids = list(ids)
        grids = {i: self.textgrids.get(i) if "/" in i else self._by_name.get(i) for i in ids}
        chapters = {_chapter(i) for i in ids}
        return AlignmentFiles(
            self.place,
            {i: path for i, path in grids.items() if path},
            {c: self.condensed[c] for c in sorted(chapters) if c in self.condensed},
            {i: self.rows[i] for i in ids if i in self.rows},
        )

    @cached_property
    def _by_name(self) -> dict[str, str]:
        return {PurePosixPath(below).name: path for below, path in self.textgrids.items()}

    def unused(self, ids: set[str]) -> Iterator[str]:
        """Utterances, and chapters of condensed files, that the corpus lacks."""
        used = set(self.of(ids).textgrids.values())
        yield from sorted(PurePosixPath(below).name for below, path in self.textgrids.items() if path not in used)
        yield from sorted(set(self.rows) - ids)
        yield from sorted(set(self.condensed) - {_chapter(i) for i in ids})

    def load(self) -> Loaded:
        out: Loaded = {}
        for name, path in self.textgrids.items():
            out[name] = _problem(parse_textgrid, self._text(path))
        for path in self.condensed.values():
            out |= parse_condensed(self._text(path))
        wanted = set(self.rows)
        for path, group in sorted(set(self.rows.values())):
            with file_system(self.place).open(path, "rb") as file:
                lines = pq.ParquetFile(file).read_row_group(group, ["id", "words"]).to_pylist()
            out |= {line["id"]: _problem(parse_row, line) for line in lines if line["id"] in wanted}
        return out

    def _text(self, path: str) -> str:
        return bytes(file_system(self.place).cat_file(path)).decode("utf-8", errors="replace")


def parse_textgrid(text: str) -> list[Interval]:
    """The tier "words". ValueError if there is none, or if the file breaks off in it."""
    try:
        tiers = textgrid_io.parseTextgridStr(text, includeEmptyIntervals=True)["tiers"]
    except (errors.PraatioException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a whole TextGrid ({type(error).__name__}: {error})") from error
    words = next((t for t in tiers if t["name"] == "words"), None)
    if words is None:
        raise ValueError(f'no tier "words", only {[t["name"] for t in tiers]}')
    found = [Interval(str(label).strip(), float(start), float(end)) for start, end, label in words["entries"]]
    if not found or max(i.end for i in found) < float(words["xmax"]) - 1e-3:
        raise ValueError(f"the words break off before {words['xmax']} s")
    return found


def parse_condensed(text: str) -> Loaded:
    """All utterances of one file; a line without an id is told under its number."""
    out: Loaded = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        parts = _LINE.fullmatch(line)
        if parts is None:
            out[line.split()[0]] = f'line {number} is not of the form ID ",W1,,W2," "t0,t1,..."'
            continue
        name, words, times = parts.groups()
        out[name] = _problem(_intervals, words.split(","), times.split(","))
    return out


def parse_row(line: dict[str, Any]) -> list[Interval]:
    return [Interval(w["word"].strip(), float(w["start"]), float(w["end"])) for w in line["words"]]


def _intervals(words: list[str], ends: list[str]) -> list[Interval]:
    if len(words) != len(ends):
        raise ValueError(f"{len(words)} words but {len(ends)} times")
    times = [0.0, *map(float, ends)]
    return [Interval(w, a, b) for w, a, b in zip(words, times, times[1:], strict=False)]


def _problem(parse: Any, *given: Any) -> list[Interval] | str:
    try:
        return list(parse(*given))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return str(error) or type(error).__name__


def _chapter(utterance: str) -> str:
    return utterance.rpartition("-")[0]


def _index(place: Place, path: str) -> dict[str, tuple[str, int]]:
    """Where each utterance is: the column `id` alone is read."""
    with file_system(place).open(path, "rb") as file:
        table = pq.ParquetFile(file)
        if missing := {"id", "words"} - set(table.schema_arrow.names):
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}: it holds no alignments")
        return {
            name: (path, group)
            for group in range(table.num_row_groups)
            for name in table.read_row_group(group, ["id"]).column("id").to_pylist()
        }
