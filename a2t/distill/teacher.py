"""What the frozen teacher said, written once and read by training.

Full distributions would take a vocabulary's width an event.  The store keeps the final hidden states at native events
only; the frozen output matrix gives back every logit.  Beside them: the native token ids fed, their unit and group.

    manifest.json               model and its hash, code version, dtype, width, shards with checksums; written last
    shard-00000.safetensors     hidden_ED, tokens_E, units_E, groups_E, starts (rows of each example)
    shard-00000.json            ids, checksum, hash: a shard without it is not finished

Shards are independent: workers write different ones, and a run that was killed goes on with those that lack.
Source: DESIGN.md section 5.  Shapes: E events, D hidden.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM, Qwen3Model

from a2t.distill.batches import Sequences
from a2t.distill.corpus import Corpus
from a2t.distill.packing import packed_forward
from a2t.distill.place import Place
from a2t.distill.sequences import Example, group_of, native_layout
from a2t.duplex.protocol import SpecialTokens

FORMAT = 1


def model_hash(language: nn.Module, tokens: SpecialTokens) -> str:
    """Names the frozen model, whatever adapter is on it and whether it already has rows for the side channel: sha256 of
    names, dtypes and values of its weights without those two rows."""
    causal = language.get_base_model() if isinstance(language, PeftModel) else language
    new = [t for t in (tokens.asr_start, tokens.asr_end) if t is not None]
    digest = hashlib.sha256()
    for name, value in sorted((_base_name(n), v) for n, v in causal.state_dict().items() if _is_base(n)):
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            keep = torch.ones(len(value), dtype=torch.bool)
            keep[[i for i in new if i < len(value)]] = False
            value = value[keep.to(value.device)]
        digest.update(f"{name} {value.dtype}\n".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _is_base(name: str) -> bool:
    return not any(part in name for part in ("lora_", "token_adapter.trainable_tokens"))


def _base_name(name: str) -> str:
    for part in (".base_layer", ".token_adapter", ".original_module"):
        name = name.replace(part, "")
    return name


@torch.no_grad()
def frozen_hidden(decoder: Qwen3Model, embedding_VD: Tensor, sequences: Sequences) -> Tensor:
    """Final hidden states [T, D] of a decoder that no adapter changes; no gradient."""
    e_TD = with_audio(F.embedding(sequences.ids_T, embedding_VD), sequences)
    return packed_forward(decoder, e_TD, sequences.positions_T, sequences.packing)


def with_audio(e_TD: Tensor, sequences: Sequences) -> Tensor:
    """Token embeddings with the audio embeddings in their places."""
    return e_TD.index_copy(0, sequences.audio_at_A, sequences.audio_AD.to(e_TD.dtype))


@dataclass(frozen=True)
class Taught:
    """One example's rows."""

    hidden_ED: Tensor
    tokens_E: Tensor
    units_E: Tensor
    groups_E: Tensor

    @property
    def native(self) -> list[list[int]]:
        """The native tokens of each unit: every one of them is an event."""
        out: list[list[int]] = [[] for _ in range(int(self.units_E.max()) + 1)]
        for unit, token in zip(self.units_E.tolist(), self.tokens_E.tolist(), strict=True):
            out[unit].append(token)
        return out


def teach(language: Qwen3ForCausalLM, tokens: SpecialTokens, examples: Sequence[Example]) -> list[Taught]:
    """Runs the teacher over the examples, packed in one forward."""
    layouts = [native_layout(tokens, e) for e in examples]
    device = language.lm_head.weight.device
    sequences = Sequences.of(layouts, [e.audio_AD for e in examples]).to(device)
    hidden_TD = frozen_hidden(language.model, language.get_input_embeddings().weight, sequences)
    out = []
    for layout, start in zip(layouts, sequences.starts, strict=True):
        at = torch.tensor([start + e.position for e in layout.events], device=device)
        out.append(
            Taught(
                hidden_TD[at].cpu(),
                torch.tensor([e.token for e in layout.events], dtype=torch.int32),
                torch.tensor([e.unit for e in layout.events], dtype=torch.int32),
                torch.tensor([group_of(tokens, e) for e in layout.events], dtype=torch.uint8),
            )
        )
    return out


# Writing


@dataclass(frozen=True)
class StorePlan:
    """Which shard holds which examples; the same on every worker."""

    folder: Place
    model: str
    hash: str
    dtype: torch.dtype
    ids: tuple[str, ...]
    shard_examples: int = 256

    @property
    def shards(self) -> int:
        return -(-len(self.ids) // self.shard_examples)

    def indices(self, shard: int) -> range:
        return range(shard * self.shard_examples, min((shard + 1) * self.shard_examples, len(self.ids)))

    def unfinished(self) -> list[int]:
        """Shards that are not there yet. Raises ValueError if the folder holds another plan's."""
        out = []
        for shard in range(self.shards):
            side = self._side(shard)
            if not side.is_file():
                out.append(shard)
                continue
            found = json.loads(side.text())
            wanted = {
                "hash": self.hash,
                "dtype": _dtype_name(self.dtype),
                "ids": [self.ids[i] for i in self.indices(shard)],
            }
            if differing := [k for k, v in wanted.items() if found[k] != v]:
                raise ValueError(
                    f"{side} was written for another {' and '.join(differing)}; choose an empty folder or delete it"
                )
        return out

    def write(self, shard: int, taught: Sequence[Taught]) -> None:
        """One shard, visible only when whole: data, checksum, then the side file."""
        assert len(taught) == len(self.indices(shard))
        starts = torch.tensor([0, *(len(t.tokens_E) for t in taught)]).cumsum(0)
        hidden_ED = torch.cat([t.hidden_ED for t in taught])
        stored_ED = hidden_ED.to(self.dtype)
        if not torch.equal(stored_ED.to(hidden_ED.dtype), hidden_ED):
            mine, its = _dtype_name(self.dtype), _dtype_name(hidden_ED.dtype)
            raise ValueError(f"a store in {mine} cannot hold this teacher's {its} states exactly; keep them in {its}")
        tensors = {
            "hidden_ED": stored_ED,
            "tokens_E": torch.cat([t.tokens_E for t in taught]),
            "units_E": torch.cat([t.units_E for t in taught]),
            "groups_E": torch.cat([t.groups_E for t in taught]),
            "starts": starts,
        }
        place = self.folder / _file(shard)
        with place.writing() as path:
            save_file(tensors, path)
            checksum, size = _sha256(path), path.stat().st_size
        side = {
            "file": place.name,
            "sha256": checksum,
            "hash": self.hash,
            "dtype": _dtype_name(self.dtype),
            "ids": [self.ids[i] for i in self.indices(shard)],
            "events": int(starts[-1]),
            "bytes": size,
        }
        _write_json(self._side(shard), side)

    def finish(self, **provenance: Any) -> None:
        """Writes the manifest when every shard is there (ValueError otherwise)."""
        if missing := self.unfinished():
            raise ValueError(f"{self.folder} lacks {len(missing)} of {self.shards} shards, the first is {missing[0]}")
        sides = [json.loads(self._side(s).text()) for s in range(self.shards)]
        _write_json(
            self.folder / "manifest.json",
            {
                "format": FORMAT,
                "model": self.model,
                "model_hash": self.hash,
                "code_version": code_version(),
                "dtype": _dtype_name(self.dtype),
                "examples": len(self.ids),
                "events": sum(s["events"] for s in sides),
                "bytes": sum(s["bytes"] for s in sides),
                "shards": [{k: s[k] for k in ("file", "sha256", "events", "bytes")} for s in sides],
                "provenance": provenance,
            },
        )

    def _side(self, shard: int) -> Place:
        return self.folder / _side_file(_file(shard))


def write_store(
    plan: StorePlan,
    language: Qwen3ForCausalLM,
    tokens: SpecialTokens,
    corpus: Corpus,
    shards: Iterable[int],
    micro_positions: int = 8192,
    progress: Callable[[int], None] = lambda examples: None,
) -> None:
    """Runs the teacher over the examples of `shards` and writes them."""
    for shard in shards:
        taught: list[Taught] = []
        for group in _by_positions((corpus[i] for i in plan.indices(shard)), micro_positions):
            taught += teach(language, tokens, group)
            progress(len(group))
        plan.write(shard, taught)


def _by_positions(examples: Iterable[Example], limit: int) -> Iterator[list[Example]]:
    group: list[Example] = []
    for e in examples:
        if group and sum(x.length for x in group) + e.length > limit:
            yield group
            group = []
        group.append(e)
    if group:
        yield group


# Reading


class TeacherStore:
    """The store in a folder. Raises ValueError if it is unfinished, of another model (`expect`: `model_hash`) or
    damaged; a shard's checksum is checked when it is first read."""

    def __init__(self, folder: str | Path | Place, expect: str):
        self.folder = Place(folder)
        path = self.folder / "manifest.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} has no manifest.json: it is no teacher store, or an unfinished one")
        self.manifest = json.loads(path.text())
        if self.manifest["format"] != FORMAT:
            raise ValueError(f"{path}: format {self.manifest['format']} is not {FORMAT}, write the store again")
        if self.manifest["model_hash"] != expect:
            raise ValueError(
                f"{self.folder} holds what {self.manifest['model']} ({self.manifest['model_hash'][:12]}) said, "
                f"not this model ({expect[:12]}): run the teacher's job for it"
            )
        self._place: dict[str, tuple[int, int]] = {}
        for n, shard in enumerate(self.manifest["shards"]):
            side = json.loads((self.folder / _side_file(shard["file"])).text())
            self._place.update({id: (n, row) for row, id in enumerate(side["ids"])})
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, id: str) -> bool:
        return id in self._place

    def __getitem__(self, id: str) -> Taught:
        if id not in self._place:
            raise ValueError(f"{self.folder} has nothing on example {id!r}: it was made for another corpus or settings")
        shard, row = self._place[id]
        file = self._shard(shard)
        start, stop = file.get_slice("starts")[row : row + 2].tolist()
        return Taught(*(file.get_slice(name)[start:stop] for name in ("hidden_ED", "tokens_E", "units_E", "groups_E")))

    def hidden(self, example: Example) -> Tensor:
        """Hidden states [E, D] at the example's native events; ValueError if it was recorded with other tokens."""
        taught = self[example.id]
        if taught.tokens_E.tolist() != [t for u in example.units for t in u.native]:
            raise ValueError(f"{self.folder}: example {example.id!r} was recorded with other native tokens")
        return taught.hidden_ED

    def verify(self) -> None:
        """Checks every shard's checksum now."""
        for n in range(len(self.manifest["shards"])):
            self._shard(n)

    def _shard(self, n: int) -> Any:
        if n not in self._open:
            shard = self.manifest["shards"][n]
            path = self.folder / shard["file"]
            if not path.is_file() or _sha256(path.local()) != shard["sha256"]:
                raise ValueError(
                    f"{path} is missing or damaged; delete it with its .json and run the teacher's job again"
                )
            self._open[n] = safe_open(path.local(), "pt")
        return self._open[n]


def code_version() -> str:
    try:
        return metadata.version("a2t")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "source"


def _file(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def _side_file(file: str) -> str:
    return file.removesuffix(".safetensors") + ".json"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(place: Place, value: Any) -> None:
    place.write_text(json.dumps(value, indent=1) + "\n")
