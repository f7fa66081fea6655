"""Training streams by index, and the cached form of a corpus on disk.

A corpus is anything with `ids`, `units` (how many each example has), `prefixes`, a length and `corpus[i] -> Example`.
A cached corpus keeps the frozen encoder's embeddings, so that everything after the encoder trains without audio:

    corpus.json            what made it: embeddings a unit, width, dtype, free-form provenance
    examples.jsonl         {"id", "prefix", "native": [[..]..], "segments": [[..] | null ..], "shard": 0, "row": 0}
    audio-00000.safetensors  "audio_AD": the embeddings of many examples one after another
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from a2t.distill.batches import plan_joins
from a2t.distill.config import DistillConfig
from a2t.distill.place import Place
from a2t.distill.sequences import Example, join, join_id

SHARD_BYTES = 256 * 2**20


class Corpus(Protocol):
    @property
    def ids(self) -> Sequence[str]: ...

    @property
    def units(self) -> Sequence[int]: ...

    @property
    def prefixes(self) -> Sequence[tuple[int, ...]]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


class Examples:
    """A corpus held in memory."""

    def __init__(self, examples: Iterable[Example]):
        self._examples = list(examples)
        self.ids = [e.id for e in self._examples]
        self.units = [len(e.units) for e in self._examples]
        self.prefixes = [e.prefix for e in self._examples]
        _refuse_doubles(self.ids, "the corpus")

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


class Joined:
    """A corpus whose utterances are laid end to end as the settings say; audio is joined when an example is taken."""

    def __init__(self, corpus: Corpus, config: DistillConfig):
        self._corpus = corpus
        self._streams = plan_joins(corpus.ids, corpus.units, corpus.prefixes, config)
        self.ids = [join_id([corpus.ids[i] for i in s]) for s in self._streams]
        self.prefixes = [corpus.prefixes[s[0]] for s in self._streams]
        self.units = [sum(corpus.units[i] for i in s) for s in self._streams]

    def __len__(self) -> int:
        return len(self._streams)

    def __getitem__(self, index: int) -> Example:
        return join([self._corpus[i] for i in self._streams[index]], self.ids[index])


class Chained:
    """Several corpora, one after another."""

    def __init__(self, corpora: Sequence[Corpus]):
        self._corpora = corpora
        self._place = [(c, i) for c, corpus in enumerate(corpora) for i in range(len(corpus))]
        self.ids = [i for c in corpora for i in c.ids]
        self.units = [u for c in corpora for u in c.units]
        self.prefixes = [p for c in corpora for p in c.prefixes]
        _refuse_doubles(self.ids, "the corpus")

    def __len__(self) -> int:
        return len(self._place)

    def __getitem__(self, index: int) -> Example:
        corpus, at = self._place[index]
        return self._corpora[corpus][at]


class CachedCorpus:
    """The corpus in a folder that `write` made. Audio is memory-mapped and read when an example is taken.

    Raises ValueError naming the file where something is missing or broken.
    """

    def __init__(self, folder: str | Path | Place):
        self.folder = Place(folder)
        if not (self.folder / "corpus.json").is_file():
            raise ValueError(f"{self.folder} has no corpus.json: it is no cached corpus, or one that was not finished")
        self.meta: dict[str, Any] = json.loads((self.folder / "corpus.json").text())
        lines = (self.folder / "examples.jsonl").text().splitlines()
        if len(lines) != self.meta["examples"]:
            raise ValueError(f"{self.folder}/examples.jsonl has {len(lines)} lines, not {self.meta['examples']}")
        self._lines = [json.loads(line) for line in lines]
        self.ids: list[str] = [line["id"] for line in self._lines]
        self.units: list[int] = [len(line["native"]) for line in self._lines]
        self.prefixes: list[tuple[int, ...]] = [tuple(line["prefix"]) for line in self._lines]
        _refuse_doubles(self.ids, str(self.folder))
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Example:
        line = self._lines[index]
        per_unit = self.meta["audio_per_unit"]
        audio_AD = self._shard(line["shard"])[line["row"] : line["row"] + per_unit * len(line["native"])]
        return Example.build(line["id"], line["prefix"], line["native"], line["segments"], audio_AD)

    def _shard(self, shard: int) -> Any:
        if shard not in self._open:
            path = self.folder / _shard_name(shard)
            if not path.is_file():
                raise ValueError(f"{path} is missing")
            self._open[shard] = safe_open(path.local(), "pt").get_slice("audio_AD")
        return self._open[shard]

    @staticmethod
    def write(
        folder: str | Path,
        examples: Iterable[Example],
        dtype: torch.dtype = torch.float32,
        allow_empty: bool = False,
        **provenance: Any,
    ) -> int:
        """Writes a corpus as it comes, one shard in memory at a time; `corpus.json` is written last, so an unfinished
        folder is not taken for a whole one. Returns the number of examples; ValueError for none or unlike ones."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "corpus.json").unlink(missing_ok=True)
        shard, row, count = 0, 0, 0
        parts: list[Tensor] = []
        shape: tuple[int, int] | None = None  # embeddings a unit, width
        with (folder / "examples.jsonl").open("w", encoding="utf-8") as lines:
            for e in examples:
                found = (e.audio_per_unit, e.audio_AD.shape[1])
                shape = shape or found
                if found != shape:
                    raise ValueError(f"example {e.id!r} has (embeddings a unit, width) {found}, those before {shape}")
                parts.append(e.audio_AD.detach().to("cpu", dtype))
                lines.write(json.dumps(_line(e, shard, row)) + "\n")
                row += len(e.audio_AD)
                count += 1
                if row * shape[1] * dtype.itemsize >= SHARD_BYTES:
                    save_file({"audio_AD": torch.cat(parts)}, folder / _shard_name(shard))
                    shard, row, parts = shard + 1, 0, []
        if shape is None and not allow_empty:
            raise ValueError(f"{folder}: there is no example to write")
        if parts:
            save_file({"audio_AD": torch.cat(parts)}, folder / _shard_name(shard))
        per_unit, hidden = shape or (0, 0)
        meta = {
            "audio_per_unit": per_unit,
            "hidden": hidden,
            "dtype": str(dtype).removeprefix("torch."),
            "examples": count,
        }
        (folder / "corpus.json").write_text(json.dumps({**meta, "provenance": provenance}, indent=2) + "\n")
        return count


def _line(e: Example, shard: int, row: int) -> dict[str, Any]:
    return {
        "id": e.id,
        "prefix": list(e.prefix),
        "native": [list(u.native) for u in e.units],
        "segments": [None if u.segment is None else list(u.segment) for u in e.units],
        "shard": shard,
        "row": row,
    }


def _shard_name(shard: int) -> str:
    return f"audio-{shard:05d}.safetensors"


def _refuse_doubles(ids: Sequence[str], where: str) -> None:
    if len(set(ids)) != len(ids):
        double = Counter(ids).most_common(1)[0][0]
        raise ValueError(f"{where} has two examples with id {double!r}")


def with_segments(
    native: Sequence[Sequence[int]], segments: Sequence[Sequence[int]], listen: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...] | None]]:
    """Pads the shorter side: trailing units that only the transcript has (words of the last half second) are units in
    which the model listens."""
    count = max(len(native), len(segments))
    natives = [tuple(n) for n in native] + [(listen,)] * (count - len(native))
    texts = [tuple(s) or None for s in segments] + [None] * (count - len(segments))
    return natives, texts
