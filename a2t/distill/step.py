"""The student and one optimizer step of it. Pure torch: tests, a plain loop and Ray Train call the same code.

Trainable are the LoRA matrices and the two token rows of the embedding and of the output matrix, which live in PEFT's
own modules, so that the adapter is PEFT's.  The forward here reads the rows directly: PEFT's layers would copy the
whole matrix to exchange two rows, and give it a gradient of its full size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from a2t.distill.batches import Batch, Sequences
from a2t.distill.config import DistillConfig
from a2t.distill.losses import TERMS, Counts, Rows, step_losses
from a2t.distill.optimizer import Optimizer, sum_over_workers, world
from a2t.distill.packing import packed_forward
from a2t.distill.teacher import frozen_hidden, with_audio
from a2t.duplex.protocol import SpecialTokens
from a2t.models.adapters import new_adapter
from a2t.models.scope import Gate, Scope


class Student(nn.Module):
    """A frozen `Qwen3ForCausalLM` under a fresh adapter. The adapter changes nothing yet, but for the new rows, which
    start as `</unit>`'s.

    The base inside, with the adapter switched off, is the teacher.  Raises ValueError if the vocabulary has no side
    channel or the model has no rows for it.
    """

    def __init__(self, language: Qwen3ForCausalLM, tokens: SpecialTokens, config: DistillConfig):
        super().__init__()
        if tokens.asr_start is None or tokens.asr_end is None:
            raise ValueError("this vocabulary has no <|asr_start|> and <|asr_end|>; add the two tokens before training")
        self.new_tokens = (tokens.asr_start, tokens.asr_end)
        if max(self.new_tokens) >= language.config.vocab_size:
            raise ValueError(
                f"the model has {language.config.vocab_size} token rows, the side channel needs row "
                f"{max(self.new_tokens)}; resize the embedding first"
            )
        self.config = config
        lora = config.lora
        if not language.training:  # gradient checkpointing and LoRA dropout work in training mode only
            language.train()
        self.peft: PeftModel = new_adapter(language, self.new_tokens, lora.rank, lora.alpha, lora.dropout)
        causal: Any = self.peft.get_base_model()
        self.decoder = causal.model
        self.scope = Scope(config.scope, config.hide_transcript)
        self.gate = Gate(self.peft) if config.scope == "segment" else None
        if config.gradient_checkpointing:
            causal.gradient_checkpointing_enable({"use_reentrant": False})
        rows = [m for m in causal.modules() if isinstance(m, TrainableTokensLayer)]
        self._embedding = next(m for m in rows if isinstance(m.get_base_layer(), nn.Embedding))
        self._output = next(m for m in rows if isinstance(m.get_base_layer(), nn.Linear))
        for layer in rows:
            assert list(layer.token_indices["default"]) == list(self.new_tokens)
            with torch.no_grad():
                weight = layer.get_base_layer().weight
                layer.trainable_tokens_delta["default"].copy_(weight[tokens.unit_end].expand(2, -1))
        self.register_buffer("_rows", torch.tensor(self.new_tokens, device=self.device), persistent=False)
        self._rows: Tensor

    @property
    def device(self) -> torch.device:
        return self._output.get_base_layer().weight.device

    @property
    def read_outside(self) -> list[nn.Parameter]:
        """Frozen matrices that the forward reads without calling their layers: what shards the model must know."""
        return [layer.get_base_layer().weight for layer in (self._embedding, self._output)]

    def trainable(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.named_parameters() if p.requires_grad}

    # The pieces of a forward

    def embed(self, sequences: Sequences) -> Tensor:
        """Token and audio embeddings of the row, [T, hidden], with the student's own two rows."""
        ids_T = sequences.ids_T
        rows_2D = self._embedding.trainable_tokens_delta["default"]
        e_TD = F.embedding(ids_T, self._embedding.get_base_layer().weight)
        for n, token in enumerate(self.new_tokens):
            e_TD = torch.where((ids_T == token)[:, None], rows_2D[n].to(e_TD.dtype), e_TD)
        return with_audio(e_TD, sequences)

    def head(self, h_ND: Tensor) -> Tensor:
        """Logits [N, V] of the student, in float32 (float64 in a float64 model)."""
        with _no_autocast(h_ND):
            base_VD, rows_2D = self._output.get_base_layer().weight, self._output.trainable_tokens_delta["default"]
            h_ND = h_ND.to(base_VD.dtype)
            logits_NV = F.linear(h_ND, base_VD)
            return _at_least_float(logits_NV.index_copy_(1, self._rows, F.linear(h_ND, rows_2D.to(base_VD.dtype))))

    def hidden(self, sequences: Sequences) -> Tensor:
        """The student's final hidden states [T, D]."""
        if self.gate is not None:
            self.gate.active_T = sequences.segment_T
        with _autocast(self.config.autocast, self.device):
            return packed_forward(self.decoder, self.embed(sequences), sequences.positions_T, sequences.packing)

    @torch.no_grad()
    def teacher_hidden(self, sequences: Sequences) -> Tensor:
        """The frozen model's final hidden states [T, D]: the same weights with the adapter switched off."""
        with self.peft.disable_adapter(), _evaluating(self.decoder):
            return frozen_hidden(self.decoder, self._embedding.get_base_layer().weight, sequences)

    def forward(self, batch: Batch, counts: Counts) -> tuple[Tensor, Tensor]:
        """The batch's part of the step's loss (a scalar) and of its four terms [4]; `counts` are the whole step's."""
        teacher_ED = batch.teacher_ED
        if teacher_ED is None:
            assert batch.teacher is not None
            teacher_ED = self.teacher_hidden(batch.teacher)[batch.teacher_at_E]
        hidden_ND = self.hidden(batch.student)[batch.at_N]
        with _no_autocast(hidden_ND):
            return step_losses(
                hidden_ND,
                self._output.trainable_tokens_delta["default"],
                self._output.get_base_layer().weight,
                Rows(batch.tokens_N, batch.groups_N, teacher_ED),
                self.new_tokens,
                counts,
                self.config.weights,
                self.config.logit_rows,
            )


def _at_least_float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _autocast(dtype: str | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, dtype))


def _no_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


# Optimizing


@dataclass(frozen=True)
class StepLog:
    """A step, summed over all workers."""

    step: int  # steps done
    loss: float
    terms: dict[str, float]
    counts: Counts
    gradient_norm: float
    learning_rate: float
    positions: int
    units: int
    seconds: float = 0.0  # that it took


def train_step(optimizer: Optimizer, forwards: Iterable[Callable[[], tuple[Batch, bool]]], local: Counts) -> StepLog:
    """One optimizer step: each of this worker's `forwards` gives (batch, whether it counts); `local` counts them.

    The loss is a mean over the whole step, so the result does not depend on how the step was cut into forwards and
    workers.
    """
    workers = world()[1]
    summed = sum_over_workers([local.targets, *local.groups])
    counts = Counts(round(summed[0]), tuple(round(x) for x in summed[1:]))
    loss_sum, term_sum, positions, units = 0.0, torch.zeros(len(TERMS), dtype=torch.float64), 0, 0
    device = next(iter(optimizer.named.values())).device
    pending = list(forwards)
    for n, make in enumerate(pending):
        batch, real = make()
        batch = batch.to(device)
        # Workers are averaged, the shares want the sum.
        loss, terms = optimizer.backward(
            partial(optimizer.module, batch, counts), float(workers if real else 0), last=n == len(pending) - 1
        )
        if real:
            loss_sum += float(loss)
            term_sum += terms.double().cpu()
            positions += len(batch.student)
            units += batch.units
    rate = optimizer.rate(optimizer.done)
    norm = optimizer.step()
    loss_sum, *rest = sum_over_workers([loss_sum, *term_sum.tolist(), positions, units])
    terms_by_name = dict(zip(TERMS, rest[: len(TERMS)], strict=True))
    return StepLog(optimizer.done, loss_sum, terms_by_name, counts, norm, rate, round(rest[-2]), round(rest[-1]))
