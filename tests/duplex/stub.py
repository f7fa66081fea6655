"""A duplex model for tests: a random stock Qwen3, a word tokenizer and an encoder of ten fixed projections a unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from a2t.duplex.protocol import TOKEN_TEXT
from a2t.kv.cache import PackedBatch
from a2t.models.language import Qwen3OverArena

AUDIO, UNIT, PROBES = 10, 16000, 16
SPECIAL = ["<pad>", *TOKEN_TEXT.values()]
WORDS = ["amber", "boat", "cup", "door", "east", "fig", "green", "hat", "ink", "jar", "kite", "lamp", "moon", "nut"] + [
    f"word{n}" for n in range(23)
]


class WordTokenizer:
    def __init__(self, special: Sequence[str] = SPECIAL, words: Sequence[str] = WORDS):
        self.vocabulary = [*special, *words]
        self.ids = {text: i for i, text in enumerate(self.vocabulary)}
        self.specials = len(special)

    def encode(self, text: str) -> list[int]:
        return [self.ids[word] for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.vocabulary[i] for i in ids if i >= self.specials)

    def token_id(self, token: str) -> int | None:
        return self.ids.get(token)


class StubState:
    """Samples not yet encoded, and the last embedding: each unit depends on the one before."""

    def __init__(self, hidden: int, dtype: torch.dtype):
        self.pcm_S = np.zeros(0, np.float32)
        self.last_D = torch.zeros(hidden, dtype=dtype)

    def push(self, pcm_S: np.ndarray) -> None:
        self.pcm_S = np.concatenate((self.pcm_S, pcm_S))

    @property
    def units_ready(self) -> int:
        return len(self.pcm_S) // UNIT

    @property
    def nbytes(self) -> int:
        return self.pcm_S.nbytes + self.last_D.nbytes

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"pcm": torch.from_numpy(self.pcm_S), "last": self.last_D}, {"samples": len(self.pcm_S)}


class StubEncoder:
    embeddings_per_unit, samples_per_unit = AUDIO, UNIT

    def __init__(self, hidden: int, dtype: torch.dtype):
        self.hidden, self.dtype = hidden, dtype
        self.weight_PD = torch.randn((PROBES, hidden), generator=torch.Generator().manual_seed(7), dtype=dtype)

    def new_state(self) -> StubState:
        return StubState(self.hidden, self.dtype)

    def restore_state(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> StubState:
        state = self.new_state()
        state.pcm_S, state.last_D = tensors["pcm"].numpy(), tensors["last"]
        assert len(state.pcm_S) == meta["samples"]
        return state

    def encode(self, states: Sequence[StubState]) -> Tensor:
        out = []
        for state in states:
            unit_AP = state.pcm_S[:UNIT].reshape(AUDIO, -1)[:, :: UNIT // AUDIO // PROBES]
            state.pcm_S = state.pcm_S[UNIT:]
            e_AD = torch.tanh(torch.from_numpy(unit_AP).to(self.dtype) @ self.weight_PD + 0.5 * state.last_D)
            state.last_D = e_AD[-1].clone()
            out.append(e_AD)
        return torch.stack(out)


class Norm(nn.Module):
    """Root mean square norm in the model's own precision: transformers' computes in float32, which rounds away what a
    comparison in float64 is there to see."""

    def __init__(self, norm: Qwen3RMSNorm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class StubModel:
    """`bias` adds to the logits of tokens, by text: a random model would open no segment and end no turn by itself."""

    name = "stub"
    default_prompt = "green hat ink"

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64, bias: Mapping[str, float] | None = None):
        torch.manual_seed(seed)
        self.tokenizer = WordTokenizer()
        config = Qwen3Config(
            vocab_size=len(self.tokenizer.vocabulary),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
        self.qwen = Qwen3ForCausalLM(config).to(dtype).eval()
        with torch.no_grad():
            for parameter in self.qwen.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0, 0.3)
        for name, norm in list(self.qwen.named_modules()):
            if isinstance(norm, Qwen3RMSNorm):
                parent, _, child = name.rpartition(".")
                setattr(self.qwen.get_submodule(parent), child, Norm(norm))
        self.over_arena = Qwen3OverArena(self.qwen)
        self.shape = self.over_arena.shape
        self.embed = self.over_arena.embed
        self.encoder = StubEncoder(config.hidden_size, dtype)
        self.bias_V = torch.zeros(config.vocab_size, dtype=dtype)
        for text, value in (BIAS if bias is None else bias).items():
            self.bias_V[self.tokenizer.ids[text]] = value

    def forward(self, e_TD: Tensor, positions_T: Tensor, batch: PackedBatch) -> Tensor:
        return self.over_arena.forward(e_TD, positions_T, batch)

    def logits(self, h_ND: Tensor) -> Tensor:
        return self.over_arena.logits(h_ND) + self.bias_V


BIAS = dict.fromkeys(WORDS, 3.0) | {
    "<pad>": -9.0,
    "<unit>": -9.0,
    "</unit>": -9.0,
    "<|tts_bos|>": -3.0,
    "<|tts_pad|>": -3.0,
    "<|chunk_eos|>": 4.0,
    "<|turn_eos|>": 4.5,
    "<|listen|>": 6.0,
    "<|asr_start|>": 7.0,
    "<|asr_end|>": 5.5,
}


def noise(units: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.3, int(units * UNIT)).astype(np.float32)
