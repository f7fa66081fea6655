"""Two losses that teach the small model to recall, in training only.

Without them recall stays at guessing (facts on the embedded model).  After layer `BIND_LAYER` a throw-away head must
name the key of the fact at its value's position, and in layer `GUIDE_LAYER` two query heads are paid for attention on
the value when it is to be answered.  They serve this small model alone, and the model card says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from a2t.pretrain.sample import Sample
from a2t.pretrain.samples import COLOUR_INDEX, KEYS

BIND_LAYER, GUIDE_LAYER, HEADS = 1, 3, 2


class Guidance(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.key = nn.Linear(hidden, len(KEYS))
        self.colour = nn.Linear(hidden, len(COLOUR_INDEX) + 1)


class Watch:
    """Catches what the two losses need during one forward pass of a stock Qwen3."""

    def __init__(self, lm: Qwen3ForCausalLM):
        self.bound_BTD: Tensor | None = None
        self.attended_BTD: Tensor | None = None
        self.rotary: tuple[Tensor, Tensor] | None = None
        layers = lm.model.layers
        layers[BIND_LAYER].register_forward_hook(self._bind)
        self.attention = layers[GUIDE_LAYER].self_attn
        self.attention.register_forward_pre_hook(self._guide, with_kwargs=True)

    def _bind(self, module: nn.Module, args: Any, output: Any) -> None:
        self.bound_BTD = output[0] if isinstance(output, tuple) else output

    def _guide(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.attended_BTD = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.rotary = kwargs["position_embeddings"]

    def losses(self, head: Guidance, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, float]]:
        """Sum of the two losses, and the share of keys named and of attention paid right."""
        assert self.bound_BTD is not None and self.attended_BTD is not None and self.rotary is not None
        bind = [(b, *x) for b, s in enumerate(samples) for x in s.bind]
        total = self.bound_BTD.new_zeros(())
        figures: dict[str, float] = {}
        if bind:
            b, t, key, colour = torch.tensor(bind).T
            h = head.norm(self.bound_BTD[b, t])
            named = head.key(h)
            total = total + F.cross_entropy(named, key) + F.cross_entropy(head.colour(h), colour)
            figures["bind"] = float((named.argmax(-1) == key).float().mean())
        attention = [self._attention_loss(n, s) for n, s in enumerate(samples) if s.guide]
        if attention:
            value = torch.cat(attention).mean()
            total = total + value
            figures["guide"] = float(value.detach())
        return total, figures

    def _attention_loss(self, n: int, sample: Sample) -> Tensor:
        """-log of the attention that each of the guided heads pays to any of a fact's positions, [answers * heads]."""
        assert self.attended_BTD is not None and self.rotary is not None
        attn: Any = self.attention
        D = attn.head_dim
        x_TD = self.attended_BTD[n, : len(sample)]
        at_N = torch.tensor([i for i, _ in sample.guide])
        q_NHD = attn.q_norm(F.linear(x_TD[at_N], attn.q_proj.weight[: HEADS * D]).view(-1, HEADS, D))
        k_T1D = attn.k_norm(F.linear(x_TD, attn.k_proj.weight[:D]).view(-1, 1, D))
        cos, sin = (r[n if r.shape[0] > 1 else 0, : len(sample)] for r in self.rotary)
        k_T1D = apply_rotary_pos_emb(k_T1D[None], k_T1D[None], cos[None], sin[None], unsqueeze_dim=2)[1][0]
        q_NHD = apply_rotary_pos_emb(q_NHD[None], q_NHD[None], cos[at_N][None], sin[at_N][None], unsqueeze_dim=2)[0][0]
        scores_NHT = torch.einsum("nhd,td->nht", q_NHD, k_T1D[:, 0]) / D**0.5
        future = torch.arange(len(sample))[None] > at_N[:, None]
        log_p = scores_NHT.masked_fill(future[:, None], float("-inf")).log_softmax(-1)
        right = torch.zeros(len(at_N), len(sample), dtype=torch.bool)
        for i, (_, sources) in enumerate(sample.guide):
            right[i, sources] = True
        return -log_p.masked_fill(~right[:, None], float("-inf")).logsumexp(-1).flatten()
