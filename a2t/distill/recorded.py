"""A recorded corpus on disk: parts that several workers write independently, each whole or absent.

    part-00000/   a cached corpus of some rows of the manifest, with report.json (counts) beside it
    part-00001/   ...

A run that was stopped goes on with the parts that lack.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from a2t.data.manifest import Row
from a2t.distill.config import DistillConfig
from a2t.distill.corpus import CachedCorpus, Chained
from a2t.distill.place import Place
from a2t.distill.recording import Report, record
from a2t.distill.sequences import Example
from a2t.models.base import DuplexModel


@dataclass(frozen=True)
class RecordPlan:
    """Which rows of a manifest are recorded, how, and in which part each of them is; the same on every worker.

    `model_hash` names the model (`teacher.model_hash`): parts of another one are refused.
    """

    folder: Place
    manifest: str
    rows: tuple[Row, ...]
    model_hash: str
    native: Literal["record", "manifest"] = "record"
    delta: float = 0.5
    max_seconds: float | None = 16.0
    rows_per_part: int = 512
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(
        cls,
        folder: str | Path | Place,
        manifest: str | Path,
        rows: Sequence[Row],
        model_hash: str,
        config: DistillConfig,
        native: Literal["record", "manifest"] = "record",
        **options: Any,
    ) -> RecordPlan:
        """With `delta` and `max_seconds` of the training settings; rows too long for them are counted in the report."""
        if not rows:
            raise ValueError(f"{manifest}: there is no row to record")
        options |= {"delta": config.delta, "max_seconds": config.max_seconds}
        return cls(Place(folder), str(manifest), tuple(rows), model_hash, native, **options)

    @property
    def parts(self) -> int:
        return -(-len(self.rows) // self.rows_per_part)

    def place(self, part: int) -> Place:
        return self.folder / f"part-{part:05d}"

    def unfinished(self) -> list[int]:
        """Parts that are not there yet. Raises ValueError if one was made from other rows, settings or model."""
        missing = []
        for part in range(self.parts):
            about = self.place(part) / "corpus.json"
            if not about.is_file():
                missing.append(part)
                continue
            found = json.loads(about.text())["provenance"]
            if differing := [k for k, v in self._provenance(part).items() if found.get(k) != v]:
                raise ValueError(
                    f"{self.place(part)} was recorded with another {', '.join(differing)}; choose an empty folder"
                )
        return missing

    def write(
        self, part: int, model: DuplexModel, at_once: int = 8, progress: Callable[[int], None] = lambda examples: None
    ) -> Report:
        """Records one part. An empty one (every row too long) is written too, so that it counts as done."""
        rows = self._rows(part)
        report = Report()

        def examples() -> Iterator[Example]:
            made = record(
                model, self.manifest, rows, self.native, self.delta, self.max_seconds, at_once=at_once, report=report
            )
            for example in made:
                yield example
                progress(1)

        with self.place(part).writing(last="corpus.json") as folder:
            CachedCorpus.write(folder, examples(), self.dtype, allow_empty=True, **self._provenance(part))
            (folder / "report.json").write_text(json.dumps(asdict(report), indent=1) + "\n")
        return report

    def open(self) -> Chained:
        """The whole corpus; ValueError if parts lack."""
        if missing := self.unfinished():
            raise ValueError(f"{self.folder} lacks {len(missing)} of {self.parts} parts, the first is {missing[0]}")
        return open_recorded(self.folder, self.parts)

    def report(self) -> Report:
        return sum((report_of(self.place(part)) for part in range(self.parts)), Report())

    def rows_of(self, part: int) -> int:
        return len(self._rows(part))

    def _rows(self, part: int) -> tuple[Row, ...]:
        return self.rows[part * self.rows_per_part : (part + 1) * self.rows_per_part]

    def _provenance(self, part: int) -> dict[str, Any]:
        digest = hashlib.sha256()
        for row in self._rows(part):
            digest.update(json.dumps(row.to_json(), sort_keys=True).encode())
        return {
            "rows": digest.hexdigest(),
            "model": self.model_hash,
            "native": self.native,
            "delta": self.delta,
            "max_seconds": self.max_seconds,
            "stored_as": str(self.dtype).removeprefix("torch."),
        }


def open_recorded(folder: str | Path | Place, parts: int | None = None) -> Chained:
    """The corpus in a recorded folder. ValueError if it has no parts, or not `parts` of them."""
    found = parts_of(folder)
    if not found or (parts is not None and len(found) != parts):
        raise ValueError(f"{folder} holds {len(found)} recorded parts" + ("" if parts is None else f", not {parts}"))
    return Chained([CachedCorpus(p) for p in found])


def parts_of(folder: str | Path | Place) -> list[Place]:
    return [Place(folder) / n for n in Place(folder).names() if re.fullmatch(r"part-\d+", n)]


def report_of(part: Place) -> Report:
    return Report(**json.loads((part / "report.json").text()))


def record_corpus(
    plan: RecordPlan, model: DuplexModel, at_once: int = 8, progress: Callable[[int], None] = lambda examples: None
) -> Chained:
    """Records what lacks, in this process alone, and opens the corpus."""
    for part in plan.unfinished():
        plan.write(part, model, at_once, progress)
    return plan.open()
