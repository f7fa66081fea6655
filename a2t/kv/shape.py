"""What decides the size of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LanguageShape:
    """The sizes of a language model that its cache and its callers must know."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    device: torch.device
    layer_devices: tuple[torch.device, ...] | None = None
    """Each layer's, where they lie on several; `device` is then that of the embedding."""

    @property
    def bytes_per_position(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize
