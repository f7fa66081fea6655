"""Attention of packed rows over the KV arena, and its door into transformers.

Query groups are folded into the query length, so keys and values are read once and never repeated. A query sees every
resident of its row; causality exists only among the row's new tokens, so a mask covers that tail, and the slots that
leave in the middle of a feed (batch.Leaving).
Suffixes as in cache.py, and: Q query heads, G query heads a KV head, t one row's new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from a2t.kv.batch import PackedBatch, Together

NAME = "a2t"
QUERY_BLOCK = 256
"""Queries of one row handled at once: bounds the mask and score memory of a long feed (a re-encoded transcript)."""


def packed_attention(q_1QTD: Tensor, batch: PackedBatch, layer: int, scale: float) -> Tensor:
    """Attention output [1, T, query heads, head_dim] of every packed row over its own residents.

    `batch.update` must have written this layer's new keys and values.
    """
    batch, layer = batch.at(layer)
    if varlen_fits(q_1QTD, batch):
        out_1TQD = varlen_attention(q_1QTD, batch, layer, scale, varlen_attn)
        for i, leaving in enumerate(batch.leaving):
            if (leaving is not None and leaving.after < batch.counts[i]) or (i, 0) in batch.masks:
                # the kernel knows no such mask
                new = slice(batch.offsets[i], batch.offsets[i] + batch.counts[i])
                out_1TQD[0, new] = _row_attention(q_1QTD[0, :, new], batch, layer, i, scale)
        return out_1TQD
    if len(batch.rows) == 1:
        return _row_attention(q_1QTD[0], batch, layer, 0, scale)[None]
    together = None if batch.hides else batch.together
    if together is not None and len(together.members) == len(batch.rows):
        return _attention_together(q_1QTD, together, layer, scale)[None]
    out_TQD = torch.empty((batch.tokens, *q_1QTD.shape[1::2]), dtype=q_1QTD.dtype, device=q_1QTD.device)
    if together is not None:
        out_TQD[together.at_K] = _attention_together(q_1QTD, together, layer, scale)
    q_rows, out_rows = q_1QTD[0].split(batch.counts, 1), out_TQD.split(batch.counts)
    for i, (q_QtD, out_tQD) in enumerate(zip(q_rows, out_rows, strict=True)):
        if together is None or i not in together.members:
            out_tQD.copy_(_row_attention(q_QtD, batch, layer, i, scale))
    return out_TQD[None]


def _attention_together(q_1QTD: Tensor, together: Together, layer: int, scale: float) -> Tensor:
    """One token each of several rows, [K, query heads, head_dim]."""
    k_RHLD, v_RHLD = together.kv_N2RHLD[layer].unbind(0)
    (R, H, _, D), Q = k_RHLD.shape, q_1QTD.shape[1]
    q_RQD = q_1QTD.new_zeros((R, Q, D))
    q_RQD[together.where_K] = q_1QTD[0].transpose(0, 1)[together.at_K]
    q_RHGD, mask = q_RQD.view(R, H, Q // H, D), together.mask_R11L
    if mask is not None:
        mask = mask.expand(-1, -1, Q // H, -1)
    o_RHGD = F.scaled_dot_product_attention(q_RHGD, k_RHLD, v_RHLD, mask, scale=scale)
    return o_RHGD.reshape(R, Q, D)[together.where_K]


def varlen_fits(q_1QTD: Tensor, batch: PackedBatch) -> bool:
    """Whether the CUDA kernel takes this batch: half precision, and pages (rows of the arena) of a multiple of 256."""
    half = q_1QTD.dtype in (torch.float16, torch.bfloat16)
    return q_1QTD.is_cuda and half and batch.arena.capacity % 256 == 0 and q_1QTD.shape[-1] % 8 == 0


def varlen_attention(
    q_1QTD: Tensor, batch: PackedBatch, layer: int, scale: float, kernel: Callable[..., Any]
) -> Tensor:
    """All rows in one call of `kernel` (torch.nn.attention.varlen.varlen_attn). A row's new tokens are its last keys,
    and that is how the kernel aligns its causal window."""
    where, kv_2RHCD = batch.paged, batch.arena.kv_N2RHCD[layer]
    out: Tensor = kernel(
        q_1QTD[0].transpose(0, 1).contiguous(),
        kv_2RHCD[0].transpose(1, 2),
        kv_2RHCD[1].transpose(1, 2),
        where.query_ends,
        where.key_ends,
        where.most_queries,
        where.most_keys,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=where.lengths,
        block_table=where.pages,
    )
    return out[None]


def _row_attention(q_QtD: Tensor, batch: PackedBatch, layer: int, i: int, scale: float) -> Tensor:
    """The batch's row i: its t new tokens are the last t of the L keys. Returns [t, query heads, head_dim]."""
    k_HLD, v_HLD = batch.dense(layer, i)
    Q, t, D = q_QtD.shape
    H, L, _ = k_HLD.shape
    if t == 1:
        q_HGD = q_QtD.reshape(1, H, Q // H, D)
        mask = batch.masks.get((i, 0))  # one token needs none, unless a model hides something from it
        return F.scaled_dot_product_attention(q_HGD, k_HLD[None], v_HLD[None], mask, scale=scale).reshape(1, Q, D)
    out = torch.empty((t, Q, D), dtype=q_QtD.dtype, device=q_QtD.device)
    for begin in range(0, t, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, t)
        b, seen = end - begin, L - t + end
        q_HFD = q_QtD[:, begin:end].reshape(1, H, Q // H * b, D)
        mask = mask_of(batch, i, begin, end, Q // H, q_QtD)
        o_HFD = F.scaled_dot_product_attention(q_HFD, k_HLD[None, :, :seen], v_HLD[None, :, :seen], mask, scale=scale)
        out[begin:end] = o_HFD.view(Q, b, D).transpose(0, 1)
    return out


def mask_of(batch: PackedBatch, i: int, begin: int, end: int, groups: int, like: Tensor) -> Tensor:
    """[groups * b, seen] of row i's new tokens begin..end: zero but for the triangle that hides later ones from earlier
    ones, and for what has left. Made once for all layers."""
    mask = batch.masks.get((i, begin))
    if mask is None:
        b, seen = end - begin, batch.starts[i] + end
        mask = torch.zeros((groups, b, seen), dtype=like.dtype, device=like.device)
        mask[..., seen - b :] = _triangle(b, like.dtype, like.device)
        leaving = batch.leaving[i]
        if leaving is not None and leaving.slots:
            mask[:, max(leaving.after - begin, 0) :, list(leaving.slots)] = -torch.inf
        mask = batch.masks[i, begin] = mask.view(groups * b, seen)
    return mask


@lru_cache(maxsize=64)
def _triangle(b: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((b, b), float("-inf"), dtype=dtype, device=device).triu(1)


def arena_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    a2t_batch: PackedBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention signature. Without a batch (a plain forward of the same model) it is stock SDPA."""
    if a2t_batch is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    assert scaling is not None
    layer: int = module.layer_idx  # type: ignore[assignment]
    return packed_attention(query, a2t_batch, layer, scaling), None


class ArenaLayer(CacheLayerMixin):
    """One layer of the arena, as transformers' cache protocol sees it: it writes, and hands back only what is new."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.batch: PackedBatch | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The arena is made before any token is seen."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.batch is not None
        self.batch.update(self.layer, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        raise AssertionError("packed rows have no common length; pass position_ids and no mask")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise AssertionError("masks are never built over the arena; pass attention_mask={'full_attention': None}")

    def get_max_length(self) -> int:
        return -1


class ArenaCache(Cache):
    """transformers' cache over the batch of one forward."""

    layers: list[ArenaLayer]

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[ArenaLayer(layer) for layer in range(layers)])

    def use(self, batch: PackedBatch | None) -> None:
        for layer in self.layers:
            layer.batch = batch


AttentionInterface.register(NAME, arena_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
