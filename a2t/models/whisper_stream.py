"""MiniCPM-o's audio encoder as a stream: transformers' own Whisper layers over a cache of their own, a unit at a time.

A unit's 50 frames attend to all cached frames and to each other; when they would bring the cache to its limit (1,500)
it is dropped whole and positions start again.  Shape suffixes: N conversations, F frames, D width, H heads, K head
width, L layers, C capacity, A embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, WhisperConfig
from transformers.activations import ACT2FN
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from a2t.audio import mel
from a2t.audio.mel import StreamingMel
from a2t.models.checkpoint import whole

NAME = "a2t_whisper"
FRAMES = mel.UNIT_FRAMES // 2  # the second convolution halves the rate
CUT = mel.REDUNDANCY // 2  # frames that redundancy leaves on either side


class WhisperState:
    """One conversation's audio: its spectrogram and the encoder's cache (EncoderState of a2t.models.base)."""

    def __init__(
        self, shape_L2HCK: tuple[int, int, int, int, int], mels: int, dtype: torch.dtype, device: torch.device
    ):
        self.mel = StreamingMel(mels)
        self.length = 0  # frames cached
        # Reserved, not touched: on CPU a page costs nothing before it is written.
        self.kv_L2HCK = torch.empty(shape_L2HCK, dtype=dtype, device=device)

    def push(self, pcm_S: np.ndarray) -> None:
        self.mel.push(pcm_S)

    @property
    def units_ready(self) -> int:
        return self.mel.units_ready

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the cached frames."""
        layers, two, heads, _, width = self.kv_L2HCK.shape
        return layers * two * heads * width * self.length * self.kv_L2HCK.element_size()

    @property
    def nbytes(self) -> int:
        return self.kv_nbytes + self.mel.nbytes

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = self.mel.export()
        tensors = {f"mel.{name}": tensor for name, tensor in tensors.items()}
        tensors["kv"] = self.kv_L2HCK[:, :, :, : self.length].cpu().clone()
        return tensors, {"mel": meta, "length": self.length}

    def append(self, layer: int, k_HFK: Tensor, v_HFK: Tensor) -> tuple[Tensor, Tensor]:
        """Writes one layer's new keys and values behind the cached ones; all of them, views [H, cached + F, K]."""
        end = self.length + k_HFK.shape[1]
        kv_2HCK = self.kv_L2HCK[layer]
        kv_2HCK[0, :, self.length : end] = k_HFK
        kv_2HCK[1, :, self.length : end] = v_HFK
        return kv_2HCK[0, :, :end], kv_2HCK[1, :, :end]


def stream_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    a2t_states: Sequence[WhisperState] = (),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: row n of the batch [N, H, F, K] attends to the cache of state n and to itself.
    No mask: every frame of a unit sees the whole unit."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    out_NFHK = torch.empty_like(query.transpose(1, 2))
    for n, state in enumerate(a2t_states):
        k_HTK, v_HTK = state.append(layer, key[n], value[n])
        o_HFK = F.scaled_dot_product_attention(query[n][None], k_HTK[None], v_HTK[None], scale=scaling)[0]
        out_NFHK[n] = o_HFK.transpose(0, 1)
    return out_NFHK, None


AttentionInterface.register(NAME, stream_attention)


class Projection(nn.Module):
    """`audio_projection_layer.`: from the encoder's width to the language model's."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x).relu())


class StreamingWhisper:
    """AudioEncoder of a2t.models.base over a `WhisperEncoder`'s weights and a projection."""

    samples_per_unit = mel.UNIT_SAMPLES

    def __init__(self, encoder: WhisperEncoder, projection: Projection, pool: int) -> None:
        config = encoder.config
        assert FRAMES % pool == 0, (FRAMES, pool)
        assert config.max_source_positions > FRAMES, config.max_source_positions
        self.encoder, self.projection, self.pool = encoder.eval(), projection.eval(), pool
        self.embeddings_per_unit = FRAMES // pool
        self.mels: int = config.num_mel_bins
        encoder.config._attn_implementation = NAME
        for index, layer in enumerate(encoder.layers):
            layer.self_attn.layer_idx = index
        # The cache is dropped when a unit would bring it to the limit: it never holds that many.
        self.capacity = (config.max_source_positions - 1) // FRAMES * FRAMES
        heads = config.encoder_attention_heads
        self._shape = (config.encoder_layers, 2, heads, self.capacity, config.d_model // heads)

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder.conv1.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.encoder.conv1.weight.device

    def new_state(self) -> WhisperState:
        return WhisperState(self._shape, self.mels, self.dtype, self.device)

    def restore_state(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> WhisperState:
        state = self.new_state()
        kv, length = tensors["kv"], meta["length"]
        layers, two, heads, _, width = self._shape
        if tuple(kv.shape) != (layers, two, heads, length, width) or kv.dtype != self.dtype:
            raise ValueError(
                f"a saved encoder cache is {list(kv.shape)} {kv.dtype}; this model's would be "
                f"{[layers, two, heads, length, width]} {self.dtype}: restore with the model that wrote it"
            )
        state.kv_L2HCK[:, :, :, :length] = kv.to(self.device)
        state.length = length
        prefix = "mel."
        state.mel = StreamingMel.restore(
            {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}, meta["mel"]
        )
        return state

    @torch.no_grad()
    def encode(self, states: Sequence[WhisperState]) -> Tensor:
        """Consumes one ready unit of each state; embeddings [N, A, hidden].  Everything but attention, whose caches
        differ in length, runs as one batch."""
        h_NFD = self._convolve([state.mel.next_unit() for state in states])
        for state in states:
            if state.length + FRAMES > self.capacity:
                state.length = 0
        starts_N = torch.tensor([state.length for state in states], device=self.device)
        positions_NF = starts_N[:, None] + torch.arange(FRAMES, device=self.device)
        h_NFD = h_NFD + self.encoder.embed_positions(positions_NF)
        for layer in self.encoder.layers:
            h_NFD = layer(h_NFD, None, a2t_states=states)
        for state in states:
            state.length += FRAMES
        e_NFD = self.projection(self.encoder.layer_norm(h_NFD))
        return F.avg_pool1d(e_NFD.transpose(1, 2), self.pool).transpose(1, 2)

    def _convolve(self, units: Sequence[Tensor]) -> Tensor:
        """[N, 50, D] of units' mel frames; first units have no redundancy before them, so they go by themselves."""
        out_NFD = torch.empty((len(units), FRAMES, self.encoder.config.d_model), dtype=self.dtype, device=self.device)
        for length in {unit.shape[1] for unit in units}:
            rows = [n for n, unit in enumerate(units) if unit.shape[1] == length]
            x_NMF = torch.stack([units[n] for n in rows]).to(device=self.device, dtype=self.dtype)
            h_NDF = F.gelu(self.encoder.conv2(F.gelu(self.encoder.conv1(x_NMF))))
            before = CUT if length == mel.UNIT_FRAMES + 2 * mel.REDUNDANCY else 0
            out_NFD[rows] = h_NDF[:, :, before : before + FRAMES].transpose(1, 2)
        return out_NFD


def whisper_config(values: dict[str, Any], where: str) -> WhisperConfig:
    """`audio_config` of a checkpoint as transformers' own; what decides sizes and arithmetic, nothing else.  `where` it
    stands is for messages: ValueError naming the setting that is missing or no size."""
    sizes = {
        name: whole(values, name, where)
        for name in (
            "num_mel_bins", "d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim",
            "max_source_positions",
        )
    }  # fmt: skip
    width, heads = sizes["d_model"], sizes["encoder_attention_heads"]
    if width % heads:
        raise ValueError(f"{where}: d_model {width} is no multiple of encoder_attention_heads {heads}")
    limit = sizes["max_source_positions"]
    if limit <= FRAMES:
        raise ValueError(f"{where}: max_source_positions is {limit}: a unit alone takes {FRAMES}")
    return WhisperConfig(
        **sizes,
        activation_function=activation(values, "activation_function", where, "gelu"),
        attn_implementation=NAME,
    )


def activation(values: dict[str, Any], name: str, where: str, usual: str) -> str:
    """Setting `name`, an activation that transformers knows."""
    value = values.get(name) or usual
    if not isinstance(value, str) or value not in ACT2FN:
        raise ValueError(f"{where}: {name} is {value!r}, which is no activation that transformers knows")
    return value
