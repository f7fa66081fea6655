"""Sequences laid side by side in one row without padding, and the attention that keeps them apart.

A forward takes positions [1, T] of several sequences.  Attention runs sequence by sequence: causal where nothing is
evicted, and in blocks of queries over the keys that any of them still sees where evictions are simulated, so that a
ten-minute stream under a small budget costs what the budget costs, not the square of its length.

Shapes: T positions, Q query heads, H key/value heads, D head width, b queries and n keys of a piece, K keys of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Model
from transformers.masking_utils import sdpa_mask

from a2t.kv.attention import arena_attention
from a2t.models.language import NO_MASK

NAME = "a2t_packed"
BLOCK = 256


@dataclass(frozen=True)
class Piece:
    """Consecutive queries of one sequence. Without a mask they see all of the sequence up to themselves; with one, the
    gathered keys where `mask_bn` [queries, keys] is True."""

    queries: int
    keys: int
    mask_bn: Tensor | None = None


@dataclass(frozen=True)
class View:
    """What the positions of one sequence see: key k is seen by query q iff k <= q < gone[k], and, where `shown` is
    given, shown[k] <= q unless q is `free` or k itself."""

    gone: Sequence[int]
    shown: Sequence[int] | None = None
    free: Sequence[bool] = ()

    @property
    def first_hidden(self) -> int:
        """Before it a query sees all before itself."""
        late = next((k for k, shown in enumerate(self.shown or ()) if shown), len(self.gone))
        return min(*self.gone, late, len(self.gone))


@dataclass(frozen=True)
class Packing:
    """The pieces cover the row in order. `keys_K`: the positions of all pieces' keys, one piece after another; None
    where every piece's keys are its queries, so that nothing needs gathering."""

    pieces: tuple[Piece, ...]
    keys_K: Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], views: Sequence[View | None] | None = None) -> Packing:
        """`views[i]`: what positions of sequence i see, None where they see all before them."""
        pieces: list[Piece] = []
        keys: list[Tensor] = []
        start = 0
        for i, length in enumerate(lengths):
            for piece, keys_n in _pieces(length, None if views is None else views[i]):
                pieces.append(piece)
                keys.append(start + keys_n)
            start += length
        masked = any(p.mask_bn is not None for p in pieces)
        return cls(tuple(pieces), torch.cat(keys) if masked else None)

    def to(self, device: torch.device) -> Packing:
        pieces = [Piece(p.queries, p.keys, None if p.mask_bn is None else p.mask_bn.to(device)) for p in self.pieces]
        return Packing(tuple(pieces), None if self.keys_K is None else self.keys_K.to(device))


def _pieces(length: int, view: View | None) -> Iterator[tuple[Piece, Tensor]]:
    """One sequence: causal until something has been hidden, then blocks over what any of their queries sees."""
    first = length if view is None else view.first_hidden
    keys_T = torch.arange(length)
    if first:
        yield Piece(first, first), keys_T[:first]
    if view is None or first == length:
        return
    gone_T, shown_T, free_T = torch.tensor(view.gone), torch.tensor(view.shown or ()), torch.tensor(view.free)
    for begin in range(first, length, BLOCK):
        end = min(begin + BLOCK, length)
        keys_n = keys_T[:end][gone_T[:end] > begin]  # seen by the block's first query, or fed within the block
        queries_b1 = torch.arange(begin, end)[:, None]
        mask_bn = (keys_n <= queries_b1) & (queries_b1 < gone_T[keys_n])
        if view.shown is not None:
            mask_bn &= (shown_T[keys_n] <= queries_b1) | free_T[begin:end, None] | (keys_n == queries_b1)
        yield Piece(end - begin, len(keys_n), mask_bn), keys_n


def packed_attention(q_1QTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, packing: Packing, scale: float) -> Tensor:
    """[1, T, Q, D]. Each sequence sees itself alone.

    Keys are gathered once for all pieces and split: the gradient of many small gathers would fill the whole row with
    zeros for each of them.
    """
    if packing.keys_K is not None:
        k_1HTD, v_1HTD = k_1HTD.index_select(2, packing.keys_K), v_1HTD.index_select(2, packing.keys_K)
    counts = [p.keys for p in packing.pieces]
    queries = q_1QTD.split([p.queries for p in packing.pieces], 2)
    outs = [
        _attend(q, k, v, piece.mask_bn, scale)
        for q, k, v, piece in zip(
            queries, k_1HTD.split(counts, 2), v_1HTD.split(counts, 2), packing.pieces, strict=True
        )
    ]
    return torch.cat(outs, 2).transpose(1, 2).contiguous()


def _attend(q_1QbD: Tensor, k_1HnD: Tensor, v_1HnD: Tensor, mask_bn: Tensor | None, scale: float) -> Tensor:
    """[1, Q, b, D]. Keys and values are never repeated for their query groups."""
    if mask_bn is None:
        return F.scaled_dot_product_attention(q_1QbD, k_1HnD, v_1HnD, is_causal=True, scale=scale, enable_gqa=True)
    _, Q, b, D = q_1QbD.shape
    H = k_1HnD.shape[1]
    q_1HFD = q_1QbD.reshape(1, H, Q // H * b, D)  # groups folded into the query length
    out = F.scaled_dot_product_attention(q_1HFD, k_1HnD, v_1HnD, mask_bn.repeat(Q // H, 1), scale=scale)
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
        attention_mask=NO_MASK,  # the packing is the mask
        use_cache=False,
        a2t_packing=packing,
    )
    return out.last_hidden_state[0]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
