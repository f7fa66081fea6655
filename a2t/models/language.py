"""A stock transformers Qwen3 run over the KV arena: its own modules, another cache and another attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from a2t.kv import attention
from a2t.kv.cache import PackedBatch
from a2t.kv.shape import LanguageShape
from a2t.models.packed_qwen3 import PackedQwen3, is_plain

NO_MASK: dict[str, None] = {"full_attention": None}
"""transformers builds no mask when it is given one for each layer type; the arena's attention needs none."""


class Qwen3OverArena:
    """Wraps a `Qwen3ForCausalLM`, bare or in a `PeftModel` (its adapter stays active, unmerged or merged).

    Puts the model in eval mode and on the attention implementation "a2t", which is stock SDPA for every call that does
    not come through this class. ValueError for a model with sliding-window layers.

    `stock`: run transformers' own modules. By default (None) they run wherever they may differ from the shorter form of
    the same arithmetic in packed_qwen3.py: with an unmerged adapter, or in another precision than float32.
    """

    def __init__(self, model: nn.Module, stock: bool | None = None) -> None:
        get_base_model: Any = getattr(model, "get_base_model", None)
        causal_lm: Any = get_base_model() if get_base_model is not None else model
        config = causal_lm.config
        sliding = [n for n, kind in enumerate(config.layer_types) if kind != "full_attention"]
        if sliding:
            raise ValueError(f"layers {sliding} are not full attention; the arena's residents are seen by every layer")
        self.model = model.eval()
        self.backbone = causal_lm.model
        self.lm_head = causal_lm.lm_head
        causal_lm.set_attn_implementation(attention.NAME)
        weight: Tensor = self.backbone.norm.weight
        self.shape = LanguageShape(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._cache = attention.ArenaCache(self.shape.layers)
        if stock is None:
            stock = not is_plain(self.backbone)
        self._packed = None if stock else PackedQwen3(self.backbone)

    @property
    def inv_freq(self) -> Tensor:
        """Rotary frequencies [head_dim / 2], for `KVArena.rotate`."""
        return self.backbone.rotary_emb.inv_freq

    @torch.no_grad()
    def embed(self, ids_T: Tensor) -> Tensor:
        """Token embeddings [T, hidden]."""
        return self.backbone.embed_tokens(ids_T)

    def forward(self, e_TD: Tensor, positions_T: Tensor, batch: PackedBatch) -> Tensor:
        """Final hidden states [T, hidden] of the packed rows; their keys and values are appended to the arena and the
        batch is committed. `positions_T`: the position of every token, whatever was evicted before it."""
        assert e_TD.shape[0] == positions_T.shape[0] == batch.tokens, (e_TD.shape, positions_T.shape, batch.counts)
        with torch.inference_mode():
            run = self._packed if self._packed is not None and self._packed.is_current() else self._run_stock
            h_TD = run(e_TD, positions_T, batch)
        batch.commit()
        return h_TD.clone()  # a normal tensor again: a loss may be computed on it

    def _run_stock(self, e_TD: Tensor, positions_T: Tensor, batch: PackedBatch) -> Tensor:
        self._cache.use(batch)
        try:
            out = self.backbone(
                inputs_embeds=e_TD[None],
                position_ids=positions_T[None],
                attention_mask=NO_MASK,
                cache=self._cache,
                a2t_batch=batch,
            )
        finally:
            self._cache.use(None)
        return out.last_hidden_state[0]

    @torch.no_grad()
    def logits(self, h_ND: Tensor) -> Tensor:
        """[N, vocab], float32 (float64 if the model runs in float64)."""
        out = self.lm_head(h_ND)
        return out if out.dtype == torch.float64 else out.float()
