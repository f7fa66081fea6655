"""What the conversation asks of a model. The unit loop and the engine know nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from a2t.kv.shape import LanguageShape as LanguageShape


class EncoderState(Protocol):
    """One conversation's audio: samples not yet encoded and the encoder's own bounded cache."""

    def push(self, pcm_S: np.ndarray) -> None:
        """Append 16 kHz mono float32 samples, any number."""

    @property
    def units_ready(self) -> int:
        """How many whole units can be encoded now."""

    @property
    def nbytes(self) -> int:
        """Bytes held: cache, buffers."""

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON values that restore this state exactly."""


class AudioEncoder(Protocol):
    embeddings_per_unit: int
    samples_per_unit: int  # 16,000

    def new_state(self) -> EncoderState: ...

    def restore_state(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> EncoderState: ...

    def encode(self, states: Sequence[Any]) -> Tensor:  # of its own states
        """Consumes one ready unit of each state; embeddings [len(states), embeddings_per_unit, hidden]."""


class TextTokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None: ...


class DuplexModel(Protocol):
    """A duplex speech model: encoder, tokenizer, language model over the KV arena."""

    name: str
    shape: LanguageShape
    default_prompt: str

    @property
    def decoding(self) -> Mapping[str, Any]:
        """Its duplex rules: settings of a2t.duplex.decoding.DuplexConfig that differ from the defaults."""

    @property
    def lm(self) -> Any:
        """The language model, a `Qwen3ForCausalLM` of transformers, bare or in a `PeftModel`."""

    @property
    def encoder(self) -> AudioEncoder: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    def embed(self, ids_T: Tensor) -> Tensor:
        """Token embeddings [T, hidden]."""

    def forward(self, e_TD: Tensor, positions_T: Tensor, batch: Any) -> Tensor:
        """Packed rows of several conversations (`batch`: a2t.kv.cache.PackedBatch says which); appends their keys and
        values to the arena and returns the final hidden states [T, hidden]."""

    def logits(self, h_ND: Tensor) -> Tensor:
        """[N, vocab] in float32 (float64 if the model runs in float64)."""
