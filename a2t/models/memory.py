"""What a conversation takes in memory, from a model's configuration alone.

    language model   bytes a position, times the positions resident
    encoder cache    what the audio encoder keeps of its own past, at its fullest
    audio buffer     samples, frames and maxima between units, at their fullest

The encoder's two come to their full size within the first 30 s and stay below it however long a conversation lasts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from a2t.audio.mel import StreamingMel
from a2t.models.whisper_stream import FRAMES


@dataclass(frozen=True)
class ConversationMemory:
    bytes_per_position: int
    encoder_cache: int
    audio_buffer: int

    @property
    def fixed(self) -> int:
        """Bytes whatever is resident."""
        return self.encoder_cache + self.audio_buffer

    def conversation(self, positions: int) -> int:
        """Bytes with that many positions resident in the language model."""
        return positions * self.bytes_per_position + self.fixed


def on_paper(config: dict[str, Any], dtype: torch.dtype) -> ConversationMemory:
    """`config`: a config.json, MiniCPM-o's or the embedded model's; `dtype`: of the weights as loaded.

    ValueError for another model type.
    """
    size = dtype.itemsize
    if config.get("model_type") == "minicpmo":
        audio = config["audio_config"]
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        capacity = (audio["max_source_positions"] - 1) // FRAMES * FRAMES
        return ConversationMemory(
            bytes_per_position=2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * size,
            encoder_cache=2 * audio["encoder_layers"] * audio["d_model"] * capacity * size,
            audio_buffer=StreamingMel.largest_nbytes(audio["num_mel_bins"]),
        )
    if config.get("model_type") == "a2t-embedded":
        from a2t.audio.conv_encoder import HOP, MELS, WINDOW

        e = config["encoder"]
        past = (e["left"] - 1) * 2 * e["layers"] * e["hidden"]
        convolutions = e["blocks"] * (e["kernel"] - 1) * e["hidden"] + 5 * MELS
        return ConversationMemory(
            bytes_per_position=2 * config["layers"] * config["kv_heads"] * config["head_dim"] * size,
            encoder_cache=4 * (past + convolutions),  # it runs in float32 whatever the language model does
            audio_buffer=4 * (WINDOW - HOP),
        )
    raise ValueError(f"the model type {config.get('model_type')!r} is not known here: minicpmo and a2t-embedded are")
