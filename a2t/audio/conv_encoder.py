"""The embedded default's audio encoder: causal log-mel, convolutions to 20 Hz and 10 Hz, block-causal transformer.

Ten embeddings a unit of one second.  Inside a unit every frame sees the whole unit and up to `left` earlier frames, so
the encoder's cache is bounded.  It is trained by a head of *word ends*, one token a 100 ms frame; the head's softmax,
times the language model's embeddings, is part of what the language model hears.  That help serves this small model
alone; nothing generic relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

RATE = 16_000
MELS, HOP, WINDOW = 80, 160, 400
FRAMES = 100  # log-mel frames a unit
PER_UNIT = 10  # embeddings a unit


@dataclass(frozen=True)
class EncoderConfig:
    hidden: int = 256
    blocks: int = 3
    layers: int = 4
    heads: int = 4
    feed_forward: int = 768
    left: int = 40
    kernel: int = 7


class LogMel(nn.Module):
    """Whisper's filter bank with a fixed normalisation; frame t ends at sample 160 (t + 1), so it needs no future."""

    mel_FM: Tensor
    window_W: Tensor

    def __init__(self) -> None:
        super().__init__()
        bank = mel_filter_bank(WINDOW // 2 + 1, MELS, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
        self.register_buffer("mel_FM", torch.tensor(bank, dtype=torch.float32), persistent=False)
        self.register_buffer("window_W", torch.hann_window(WINDOW), persistent=False)

    def forward(self, pcm_BS: Tensor) -> Tensor:
        """`pcm_BS` begins with the WINDOW - HOP samples before the first frame; returns [B, (S - 240) // 160, 80]."""
        frames_BTW = pcm_BS.unfold(-1, WINDOW, HOP) * self.window_W
        power_BTF = torch.fft.rfft(frames_BTW).abs().square()
        return (torch.clamp(power_BTF @ self.mel_FM, min=1e-8).log10() + 4) / 4


class ConvBlock(nn.Module):
    """Depthwise causal convolution and a feed-forward, residual, 20 Hz."""

    def __init__(self, hidden: int, kernel: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.depth = nn.Conv1d(hidden, hidden, kernel, groups=hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x_BTD: Tensor, past_BKD: Tensor) -> tuple[Tensor, Tensor]:
        h_BTD = torch.cat([past_BKD, self.norm(x_BTD)], 1)
        keep = past_BKD.shape[1]
        # the depthwise convolution as shifted sums: faster on CPU than Conv1d with groups
        w_DK, T = self.depth.weight[:, 0], x_BTD.shape[1]
        y_BTD = h_BTD[:, :T] * w_DK[:, 0]
        for k in range(1, w_DK.shape[1]):
            y_BTD = y_BTD + h_BTD[:, k : k + T] * w_DK[:, k]
        assert self.depth.bias is not None
        y_BTD = y_BTD + self.depth.bias
        return x_BTD + self.down(F.gelu(self.up(y_BTD), approximate="tanh")), h_BTD[:, h_BTD.shape[1] - keep :]


def _rotate(x_BHTD: Tensor, positions_T: Tensor) -> Tensor:
    half = x_BHTD.shape[-1] // 2
    frequency = 10_000 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions_T[:, None].float() * frequency
    cos, sin = angle.cos().to(x_BHTD.dtype), angle.sin().to(x_BHTD.dtype)
    a, b = x_BHTD.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    """Pre-norm attention and feed-forward at 10 Hz over cached plus new frames."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        d = config.hidden
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, config.feed_forward), nn.Linear(config.feed_forward, d)

    def forward(
        self, x_BTD: Tensor, mask_TS: Tensor, past: tuple[Tensor, Tensor] | None, keep: int
    ) -> tuple[Tensor, Any]:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(self.norm1(x_BTD)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        S = k.shape[2]
        positions_S = torch.arange(S)
        # keys are cached before rotation: only distances matter, so each call counts from its own first key
        y = F.scaled_dot_product_attention(_rotate(q, positions_S[S - T :]), _rotate(k, positions_S), v, mask_TS)
        x_BTD = x_BTD + self.out(y.transpose(1, 2).reshape(B, T, D))
        x_BTD = x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD)), approximate="tanh"))
        return x_BTD, (k[:, :, S - keep :], v[:, :, S - keep :]) if keep else None


Caches = dict[str, Tensor]


class ConvEncoder(nn.Module):
    def __init__(self, config: EncoderConfig, vocab: int):
        super().__init__()
        self.config, self.vocab = config, vocab
        d = config.hidden
        self.stem = nn.Linear(10 * MELS, d)  # 10 frames, stride 5: 20 Hz
        self.conv = nn.ModuleList(ConvBlock(d, config.kernel) for _ in range(config.blocks))
        self.join = nn.Linear(2 * d, d)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(d)
        self.word_head = nn.Linear(d, vocab)

    def new_caches(self, batch: int) -> Caches:
        """Zeros where nothing was heard yet; the attention cache starts empty."""
        d, c = self.config.hidden, self.config
        weight = self.stem.weight
        caches = {"mel": weight.new_full((batch, 5, MELS), -1.0)}
        caches |= {f"conv{i}": weight.new_zeros(batch, c.kernel - 1, d) for i in range(c.blocks)}
        for i in range(c.layers):
            for part in "kv":
                caches[f"{part}{i}"] = weight.new_zeros(batch, c.heads, 0, d // c.heads)
        return caches

    def forward(self, mel_BTM: Tensor, caches: Caches | None = None) -> tuple[Tensor, Caches]:
        """Log-mel [B, units * 100, 80] -> embeddings [B, units * 10, hidden] and the caches for the next call."""
        c = self.config
        old = self.new_caches(mel_BTM.shape[0]) if caches is None else caches
        new: Caches = {"mel": mel_BTM[:, -5:]}
        B, T, _ = mel_BTM.shape
        frames = torch.cat([old["mel"], mel_BTM], 1)
        x = self.stem(frames.unfold(1, 10, 5).transpose(2, 3).reshape(B, T // 5, 10 * MELS))
        for i, conv in enumerate(self.conv):
            x, new[f"conv{i}"] = conv(x, old[f"conv{i}"])
        x = self.join(x.reshape(B, T // 10, -1))
        past = old["k0"].shape[2]
        mask = self._mask(x.shape[1], past)
        keep = min(c.left - 1, past + x.shape[1])
        for i, layer in enumerate(self.layers):
            x, cache = layer(x, mask, (old[f"k{i}"], old[f"v{i}"]) if past else None, keep)
            new[f"k{i}"], new[f"v{i}"] = cache
        return self.norm(x), new

    def _mask(self, new: int, past: int) -> Tensor:
        """A frame sees its whole unit, and earlier frames less than `left` back; `past` cached frames end a unit."""
        i = torch.arange(new)[:, None]
        j = torch.arange(-past, new)[None, :]
        unit_i, unit_j = torch.div(i, PER_UNIT, rounding_mode="floor"), torch.div(j, PER_UNIT, rounding_mode="floor")
        return (unit_j <= unit_i) & (i - j < self.config.left)


class Adaptor(nn.Module):
    """Encoder states -> what the language model hears: a projection plus the expected word embedding."""

    word_embedding_VD: Tensor

    def __init__(self, encoder_hidden: int, hidden: int, vocab: int):
        super().__init__()
        self.project = nn.Linear(encoder_hidden, hidden)
        self.word_embedding = nn.Parameter(torch.zeros(vocab, hidden), requires_grad=False)
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.project.bias)

    def forward(self, h_NE: Tensor, word_logits_NV: Tensor, word_embedding_VD: Tensor | None = None) -> Tensor:
        table = self.word_embedding if word_embedding_VD is None else word_embedding_VD
        p_NV = torch.softmax(word_logits_NV, -1)
        return self.project(h_NE) + p_NV[..., 1:] @ table[1:]  # id 0 stands for "no word ends here"


class StreamState:
    """One conversation's samples and encoder caches."""

    def __init__(self, caches: Caches):
        self.caches = caches
        self.tail_S = np.zeros(WINDOW - HOP, np.float32)  # the samples before the next unit's first frame
        self.waiting_S = np.zeros(0, np.float32)

    def push(self, pcm_S: np.ndarray) -> None:
        self.waiting_S = np.concatenate([self.waiting_S, pcm_S.astype(np.float32, copy=False)])

    @property
    def units_ready(self) -> int:
        return len(self.waiting_S) // RATE

    @property
    def nbytes(self) -> int:
        cached = sum(t.numel() * t.element_size() for t in self.caches.values())
        return cached + self.tail_S.nbytes + self.waiting_S.nbytes

    def take_unit(self) -> np.ndarray:
        unit_S = np.concatenate([self.tail_S, self.waiting_S[:RATE]])
        self.tail_S, self.waiting_S = unit_S[-(WINDOW - HOP) :], self.waiting_S[RATE:]
        return unit_S

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"cache.{k}": v.contiguous() for k, v in self.caches.items()}
        tensors |= {"tail": torch.from_numpy(self.tail_S.copy()), "waiting": torch.from_numpy(self.waiting_S.copy())}
        return tensors, {}


class StreamingConvEncoder:
    """The AudioEncoder of the embedded default (a2t.models.base)."""

    embeddings_per_unit = PER_UNIT
    samples_per_unit = RATE

    def __init__(self, encoder: ConvEncoder, adaptor: Adaptor, out_dtype: torch.dtype = torch.float32):
        self.encoder, self.adaptor, self.mel, self.out_dtype = encoder.eval(), adaptor.eval(), LogMel(), out_dtype

    def new_state(self) -> StreamState:
        return StreamState(self.encoder.new_caches(1))

    def restore_state(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> StreamState:
        state = StreamState({k.removeprefix("cache."): v for k, v in tensors.items() if k.startswith("cache.")})
        state.tail_S, state.waiting_S = tensors["tail"].numpy().copy(), tensors["waiting"].numpy().copy()
        return state

    @torch.inference_mode()
    def encode(self, states: Sequence[StreamState]) -> Tensor:
        """One ready unit of each state -> [N, 10, hidden]. States of different age are encoded one by one: their
        caches differ in length for the first four units only."""
        groups: dict[int, list[int]] = {}
        for n, state in enumerate(states):
            groups.setdefault(state.caches["k0"].shape[2], []).append(n)
        out: list[Tensor | None] = [None] * len(states)
        for members in groups.values():
            pcm = torch.from_numpy(np.stack([states[n].take_unit() for n in members]))
            caches = {k: torch.cat([states[n].caches[k] for n in members]) for k in states[members[0]].caches}
            h_NTE, caches = self.encoder(self.mel(pcm), caches)
            e_NTD = self.adaptor(h_NTE, self.encoder.word_head(h_NTE)).to(self.out_dtype)
            for row, n in enumerate(members):
                states[n].caches = {k: v[row : row + 1].clone() for k, v in caches.items()}
                out[n] = e_NTD[row]
        return torch.stack([e for e in out if e is not None])
