"""Where an adapter acts, and what native positions see of the transcript. Beyond the paper; by default as published.

- `where="segment"`: LoRA acts on the side channel's own positions (`<|asr_start|>`, transcript, `<|asr_end|>`) alone.
  Native positions run on the untouched base, so what they add to the cache is what the base would have added.
- `hide_transcript`: native positions, and `<|asr_end|>`, which predicts the native token after it, do not see the side
  channel's positions of a unit whose audio is still resident.  When the audio has been evicted, the text takes over.

The same rules hold in training (`a2t.distill`) and while streaming (`ScopedModel`).  An adapter's folder says them in
scope.json; without that file they are the paper's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from a2t.kv import attention
from a2t.kv.batch import PackedBatch
from a2t.kv.kinds import Kind
from a2t.models.adapters import load_adapter
from a2t.models.language import Qwen3OverArena

FILE = "scope.json"
PLACES = ("everywhere", "segment")
SIDE = frozenset({Kind.ASR, Kind.TRANSCRIPT})


@dataclass(frozen=True)
class Scope:
    where: str = "everywhere"
    hide_transcript: bool = False

    def __post_init__(self) -> None:
        if self.where not in PLACES:
            raise ValueError(f"scope {self.where!r} is not one of {', '.join(PLACES)}")

    @classmethod
    def read(cls, adapter: str | Path) -> Scope:
        """What an adapter's folder says. ValueError for a file of another form."""
        path = Path(adapter) / FILE
        if not path.is_file():
            return cls()
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path} does not say a scope ({error}): train the adapter again, or copy it whole"
            ) from error

    def write(self, adapter: str | Path) -> None:
        """Beside an adapter, where it is not the paper's."""
        if self != Scope():
            (Path(adapter) / FILE).write_text(json.dumps(asdict(self)) + "\n")


class Gate:
    """Multiplies what LoRA adds by 0 or 1, position by position. `active_T` None: LoRA acts everywhere.

    It stays as it was set until it is set again, so that a layer recomputed in the backward pass finds it.
    """

    def __init__(self, model: nn.Module):
        self.active_T: Tensor | None = None
        for name, module in model.named_modules():
            if name.rpartition(".")[0].endswith("lora_B"):
                module.register_forward_hook(self._gate)

    def _gate(self, module: nn.Module, args: Any, out_1TD: Tensor) -> Tensor:
        return out_1TD if self.active_T is None else out_1TD * self.active_T[:, None].to(out_1TD.dtype)


class ScopedModel:
    """A duplex model (a2t.models.base) whose unmerged adapter keeps to a scope."""

    def __init__(self, model: Any, peft: nn.Module, scope: Scope, asr_end: int):
        self.model, self.scope, self.asr_end = model, scope, asr_end
        self.gate = Gate(peft) if scope.where == "segment" else None
        self.query_heads: int = model.language.backbone.config.num_attention_heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, e_TD: Tensor, positions_T: Tensor, batch: PackedBatch) -> Tensor:
        assert len(batch.feeds) == len(batch.rows), "the engine says what it feeds"
        if self.gate is not None:
            active = [kind in SIDE for feed in batch.feeds for kind in feed.kinds]
            self.gate.active_T = torch.tensor(active, device=e_TD.device)
        if self.scope.hide_transcript:
            self._hide(e_TD, batch)
        out: Tensor = self.model.forward(e_TD, positions_T, batch)
        return out

    def _hide(self, like: Tensor, batch: PackedBatch) -> None:
        """Puts what native positions do not see into the batch's attention masks."""
        batch.hides = True
        labels = batch.arena.labelled()
        groups = self.query_heads // self.model.shape.kv_heads
        for i, (row, feed) in enumerate(zip(batch.rows, batch.feeds, strict=True)):
            held = labels[row]
            if len(held) != batch.starts[i]:
                raise ValueError("a conversation that was restored cannot go on with hide_transcript: begin a new one")
            units = feed.units or [feed.unit] * len(feed.ids)
            held += [_label(kind, unit) for kind, unit in zip(feed.kinds, units, strict=True)]
            leaving = batch.leaving[i]
            after = leaving.after if leaving is not None else batch.counts[i]
            gone = frozenset(leaving.slots) if leaving is not None else frozenset[int]()
            native = [kind not in SIDE or id == self.asr_end for kind, id in zip(feed.kinds, feed.ids, strict=True)]
            for first, last, absent in ((0, after, frozenset[int]()), (after, batch.counts[i], gone)):
                queries = [t for t in range(first, last) if native[t]]
                hidden = _hidden(held, absent)
                if queries and hidden:
                    self._mask(like, batch, i, groups, queries, hidden)

    @staticmethod
    def _mask(
        like: Tensor, batch: PackedBatch, i: int, groups: int, queries: Sequence[int], hidden: Sequence[int]
    ) -> None:
        for begin in range(0, batch.counts[i], attention.QUERY_BLOCK):
            end = min(begin + attention.QUERY_BLOCK, batch.counts[i])
            mask = attention.mask_of(batch, i, begin, end, groups, like).view(groups, end - begin, -1)
            seen = mask.shape[-1]
            columns = torch.tensor([s for s in hidden if s < seen], device=like.device)
            for t in queries:
                if begin <= t < end:
                    mask[:, t - begin, columns[columns != batch.starts[i] + t]] = -torch.inf  # itself it sees


def _label(kind: Kind, unit: int) -> int:
    """Of a slot: the unit (from 1) that it writes down, the negative of the unit that it is audio of, 0 otherwise."""
    return unit + 1 if kind in SIDE else -(unit + 1) if kind == Kind.AUDIO else 0


def _hidden(labels: Sequence[int], absent: frozenset[int]) -> list[int]:
    """Slots of the side channel whose unit has audio in other slots than the `absent` ones."""
    heard = {-label for slot, label in enumerate(labels) if label < 0 and slot not in absent}
    return [slot for slot, label in enumerate(labels) if label > 0 and label in heard]


def adapted(model: Any, lm: Qwen3ForCausalLM, adapter: str | Path) -> Any:
    """The duplex model with the adapter in a folder: merged where it acts everywhere, kept apart where it does not.

    `model` has its language model `lm` under `language`, as TinyDuplex and MiniCPMO do, and is changed in place.
    """
    scope = Scope.read(adapter)
    if scope == Scope():
        model.language = Qwen3OverArena(load_adapter(lm, adapter))
        return model
    if scope.hide_transcript and model.shape.layer_devices is not None:
        raise ValueError(f"{adapter} hides the transcript, which a model over several devices cannot: use one device")
    peft = load_adapter(lm, adapter, merge=False)
    model.language = Qwen3OverArena(peft)
    asr_end = model.tokenizer.token_id("<|asr_end|>")
    assert asr_end is not None
    return ScopedModel(model, peft, scope, asr_end)
