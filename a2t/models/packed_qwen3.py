"""Qwen3's decoder layers with fewer calls: the same weights and arithmetic as transformers' modules, on packed rows.

A one-token step of a small model is mostly the cost of calling: the stock modules make about 75 tensor operations a
layer, this makes about 25.  It reads the stock modules' own parameters (no copies), so loading, saving and training
stay with transformers.  Suffixes as in a2t.kv.attention; F is the feed-forward size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from a2t.kv.attention import packed_attention
from a2t.kv.cache import PackedBatch


class _Layer(NamedTuple):
    """One decoder layer's parameters."""

    norm_in: Tensor
    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o_proj: Tensor
    norm_mlp: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor


def is_plain(backbone: Any) -> bool:
    """Whether every projection is an untouched `nn.Linear` (no unmerged adapter, bias, quantization or hook) and the
    model runs in float32. In other precisions the stock norms round in places of their own, so they are kept."""
    if backbone.norm.weight.dtype != torch.float32 or backbone.config.hidden_act != "silu":
        return False
    projections = [m for name, m in backbone.layers.named_modules() if name.endswith("_proj")]
    return len(projections) == 7 * len(backbone.layers) and all(
        type(m) is nn.Linear and m.bias is None and not m._forward_hooks and not m._forward_pre_hooks
        for m in projections
    )


class PackedQwen3:
    """The backbone (a transformers `Qwen3Model`) as one function. Parameters are held by reference: changes in place
    are seen; `is_current` says whether a module or a parameter was replaced since (an adapter put on, say)."""

    def __init__(self, backbone: Any) -> None:
        assert is_plain(backbone)
        config = backbone.config
        self.rotary = backbone.rotary_emb
        self.head_dim: int = backbone.layers[0].self_attn.head_dim
        self.scale: float = backbone.layers[0].self_attn.scaling
        self.eps: float = config.rms_norm_eps
        self.norm_out: Tensor = backbone.norm.weight
        self.layers = [
            _Layer(
                layer.input_layernorm.weight,
                layer.self_attn.q_proj.weight,
                layer.self_attn.k_proj.weight,
                layer.self_attn.v_proj.weight,
                layer.self_attn.q_norm.weight,
                layer.self_attn.k_norm.weight,
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm.weight,
                layer.mlp.gate_proj.weight,
                layer.mlp.up_proj.weight,
                layer.mlp.down_proj.weight,
            )
            for layer in backbone.layers
        ]

        self._held: list[tuple[Mapping[str, Any], str, Any]] = [
            (names, name, held)
            for module in backbone.layers.modules()
            for names in (module._modules, module._parameters)
            for name, held in names.items()
        ]

    def is_current(self) -> bool:
        """Whether the modules and parameters are still those that were read, in float32. A few microseconds a layer."""
        if self.norm_out.dtype != torch.float32:
            return False
        return all(names.get(name) is held for names, name, held in self._held)

    def __call__(self, x_TD: Tensor, positions_T: Tensor, batch: PackedBatch) -> Tensor:
        """Final hidden states [T, hidden]; writes keys and values through `batch`, does not commit it."""
        T, D = x_TD.shape
        d, eps = self.head_dim, self.eps
        cos_1Td, sin_1Td = self.rotary(x_TD[None], positions_T[None])
        cos_T1d, sin_T1d = cos_1Td.view(T, 1, d), sin_1Td.view(T, 1, d)
        # rotate_half(x) * sin == roll(x) * (-sin, sin)
        sin_T1d = torch.cat((-sin_T1d[..., : d // 2], sin_T1d[..., d // 2 :]), -1)
        for n, w in enumerate(self.layers):
            h_TD = F.rms_norm(x_TD, (D,), w.norm_in, eps)
            q_TQd = F.rms_norm(_project(h_TD, w.q_proj).view(T, -1, d), (d,), w.q_norm, eps)
            k_THd = F.rms_norm(_project(h_TD, w.k_proj).view(T, -1, d), (d,), w.k_norm, eps)
            v_THd = _project(h_TD, w.v_proj).view(T, -1, d)
            q_TQd = torch.addcmul(q_TQd * cos_T1d, q_TQd.roll(d // 2, -1), sin_T1d)
            k_THd = torch.addcmul(k_THd * cos_T1d, k_THd.roll(d // 2, -1), sin_T1d)
            batch.update(n, k_THd.transpose(0, 1)[None], v_THd.transpose(0, 1)[None])
            o_1TQd = packed_attention(q_TQd.transpose(0, 1)[None], batch, n, self.scale)
            x_TD = _add_projected(x_TD, o_1TQd.view(T, -1), w.o_proj)
            h_TD = F.rms_norm(x_TD, (D,), w.norm_mlp, eps)
            g_TF = F.silu(_project(h_TD, w.gate_proj), inplace=True).mul_(_project(h_TD, w.up_proj))
            x_TD = _add_projected(x_TD, g_TF, w.down_proj)
        return F.rms_norm(x_TD, (D,), self.norm_out, eps)


def _project(x_TI: Tensor, w_OI: Tensor) -> Tensor:
    """x @ w.T. A matrix-vector product takes half the time of a matrix product with one row on CPU."""
    return torch.mv(w_OI, x_TI[0])[None] if len(x_TI) == 1 else F.linear(x_TI, w_OI)


def _add_projected(r_TO: Tensor, x_TI: Tensor, w_OI: Tensor) -> Tensor:
    """r + x @ w.T."""
    return torch.addmv(r_TO[0], w_OI, x_TI[0])[None] if len(x_TI) == 1 else torch.addmm(r_TO, x_TI, w_OI.t())
