"""Sequences laid side by side in one row without padding, and the attention that keeps them apart.

A forward takes positions [1, T] of several sequences.  Attention runs sequence by sequence: causal where nothing is
evicted, and in blocks of queries over the keys that any of them still sees where evictions are simulated, so that a
ten-minute stream under a small budget costs what the budget costs, not the square of its length.

Shapes: T positions, Q query heads, H key/value heads, G = Q / H, D head width, n keys of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Model
from transformers.masking_utils import sdpa_mask

from a2t.kv.attention import arena_attention

NAME = "a2t_packed"
BLOCK = 256


@dataclass(frozen=True)
class Block:
    """Queries start..stop (of the packed row) over the keys in `keys_n`; `mask_bn` is True where a query sees a key."""

    start: int
    stop: int
    keys_n: Tensor
    mask_bn: Tensor


@dataclass(frozen=True)
class Span:
    """One sequence: positions start..stop of the row. Queries before `causal_until` see all before them; the others
    are in `blocks`."""

    start: int
    stop: int
    causal_until: int
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Packing:
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], hidden: Sequence[Sequence[int] | None] | None = None) -> Packing:
        """`hidden[i]`: `sequences.hidden_from` of sequence i, None where nothing is evicted."""
        spans, start = [], 0
        for i, length in enumerate(lengths):
            spans.append(_span(start, length, None if hidden is None else hidden[i]))
            start += length
        return cls(tuple(spans))

    def to(self, device: torch.device) -> Packing:
        moved = [
            Span(
                s.start,
                s.stop,
                s.causal_until,
                tuple(Block(b.start, b.stop, b.keys_n.to(device), b.mask_bn.to(device)) for b in s.blocks),
            )
            for s in self.spans
        ]
        return Packing(tuple(moved))


def _span(start: int, length: int, hidden: Sequence[int] | None) -> Span:
    stop = start + length
    first = length if hidden is None else min([*hidden, length])
    if hidden is None or first == length:
        return Span(start, stop, stop)
    gone_T = torch.tensor(hidden)
    keys_T = torch.arange(length)
    blocks = []
    for begin in range(first, length, BLOCK):
        end = min(begin + BLOCK, length)
        keys_n = keys_T[:end][gone_T[:end] > begin]  # seen by the block's first query or fed within the block
        queries_b1 = torch.arange(begin, end)[:, None]
        mask_bn = (keys_n <= queries_b1) & (queries_b1 < gone_T[keys_n])
        blocks.append(Block(start + begin, start + end, start + keys_n, mask_bn))
    return Span(start, stop, start + first, tuple(blocks))


def packed_attention(q_1QTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, packing: Packing, scale: float) -> Tensor:
    """[1, T, Q, D]. Each sequence sees itself alone."""
    outs = []
    for span in packing.spans:
        s, e = span.start, span.causal_until
        if e > s:
            q, k, v = q_1QTD[:, :, s:e], k_1HTD[:, :, s:e], v_1HTD[:, :, s:e]
            outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True))
        outs += [_block_attention(q_1QTD, k_1HTD, v_1HTD, block, scale) for block in span.blocks]
    return torch.cat(outs, 2).transpose(1, 2).contiguous()


def _block_attention(q_1QTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, block: Block, scale: float) -> Tensor:
    """[1, Q, b, D]. Query groups are folded into the query length, so keys and values are not repeated."""
    Q, D, H = q_1QTD.shape[1], q_1QTD.shape[3], k_1HTD.shape[1]
    b, G = block.stop - block.start, Q // H
    q_1HFD = q_1QTD[:, :, block.start : block.stop].reshape(1, H, G * b, D)
    k_1HnD, v_1HnD = k_1HTD.index_select(2, block.keys_n), v_1HTD.index_select(2, block.keys_n)
    mask_Fn = block.mask_bn.repeat(G, 1)
    out = F.scaled_dot_product_attention(q_1HFD, k_1HnD, v_1HnD, mask_Fn, scale=scale)
    return out.view(1, Q, b, D)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    a2t_packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention signature. Without a packing it is the arena's attention or stock SDPA, so that the same
    model still streams and runs plain forwards."""
    if a2t_packing is None:
        return arena_attention(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    assert scaling is not None and dropout == 0.0
    return packed_attention(query, key, value, a2t_packing, scaling), None


def packed_forward(decoder: Qwen3Model, e_TD: Tensor, positions_T: Tensor, packing: Packing) -> Tensor:
    """Final hidden states [T, hidden] of a stock decoder (`Qwen3Model`), whose attention this module then serves."""
    if decoder.config._attn_implementation != NAME:
        decoder.set_attn_implementation(NAME)
    out = decoder(
        inputs_embeds=e_TD[None],
        position_ids=positions_T[None],
        attention_mask={"full_attention": None},  # the packing is the mask
        use_cache=False,
        a2t_packing=packing,
    )
    return out.last_hidden_state[0]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
