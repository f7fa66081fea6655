"""MiniCPM-o 4.5 from its own safetensors: stock Qwen3 and Whisper modules of transformers, none of its code.

Reads `llm.`, `apm.` and `audio_projection_layer.` of a checkpoint; the vision and speech parts stay on disk
(a2t.models.minicpmo_speech reads `tts.`).  Its duplex rules are in a2t.duplex, shared with every other model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from a2t.duplex.protocol import SpecialTokens
from a2t.kv.cache import PackedBatch
from a2t.models.adapters import add_side_channel_tokens, load_adapter
from a2t.models.checkpoint import Checkpoint
from a2t.models.language import Qwen3OverArena
from a2t.models.whisper_stream import Projection, StreamingWhisper, whisper_config

MODEL_TYPE = "minicpmo"
LANGUAGE, ENCODER, PROJECTION = "llm.", "apm.", "audio_projection_layer."
PROMPT = "<|im_start|>system\nStreaming Duplex Conversation! You are a helpful assistant.<|im_end|>\n"
MARKER = "\n\nprevious: "

DeviceMap = Mapping[str, str | int]


class CheckpointTokenizer:
    """A checkpoint's tokenizer.json (TextTokenizer of a2t.models.base)."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    @classmethod
    def read(cls, folder: Path) -> CheckpointTokenizer:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json: download the checkpoint again")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path} cannot be read as a tokenizer ({error}): download it again") from error

    @property
    def size(self) -> int:
        """Ids are below this."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text."""
        return frozenset(i for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def add_tokens(self, tokens: Sequence[str]) -> list[int]:
        self.tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
        return [i for t in tokens if (i := self.tokenizer.token_to_id(t)) is not None]


class MiniCPMO:
    """DuplexModel (a2t.models.base). `lm`: the language model, bare or in a PeftModel (several adapters on one base,
    see a2t.models.adapters)."""

    default_prompt = PROMPT

    def __init__(self, lm: nn.Module, encoder: StreamingWhisper, tokenizer: CheckpointTokenizer, name: str):
        self.name, self.lm, self.encoder, self.tokenizer = name, lm, encoder, tokenizer
        devices = layer_devices(lm)
        self.language = Qwen3OverArena(lm, stock=None if devices is None else True)
        self.shape = self.language.shape
        if devices is not None:
            first = self.language.backbone.embed_tokens.weight.device
            self.shape = replace(self.shape, device=first, layer_devices=devices)
        self.tokens = SpecialTokens.from_lookup(tokenizer.token_id)

    @property
    def inv_freq(self) -> Tensor:
        """Rotary frequencies [head_dim / 2], for windows that re-rotate what they keep."""
        return self.language.inv_freq

    def context_window(
        self, suffix: str = "<|im_end|>\n", max_units: int = 24, previous_max_tokens: int = 500, marker: str = MARKER
    ) -> dict[str, Any]:
        """Options of the `context` policy (a2t.kv.windows) for a system prompt that ends with `suffix`."""
        return {
            "suffix_ids": self.tokenizer.encode(suffix),
            "marker_ids": self.tokenizer.encode(marker),
            "special_ids": sorted(self.tokenizer.special_ids),
            "max_units": max_units,
            "previous_max_tokens": previous_max_tokens,
        }

    def embed(self, ids_T: Tensor) -> Tensor:
        return self.language.embed(ids_T)

    def forward(self, e_TD: Tensor, positions_T: Tensor, batch: PackedBatch) -> Tensor:
        return self.language.forward(e_TD, positions_T, batch)

    def logits(self, h_ND: Tensor) -> Tensor:
        return self.language.logits(h_ND)


def load_minicpmo(
    path: str | Path,
    adapter: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    device_map: DeviceMap | Literal["auto"] | None = None,
    side_channel: bool | None = None,
) -> MiniCPMO:
    """The model in a folder or under a hub id.

    `dtype`: a torch type or its name ("bfloat16"); None keeps the checkpoint's own, and on the CPU the weights are then
    the mapped file itself.  `device_map`: places the language model's layers on several devices ("auto", or a map from
    its module names, "" for the rest); the encoder goes where the embedding is.  `adapter`: a PEFT folder, merged.
    `side_channel`: gives the model the two tokens of the side channel; None: where there is an adapter.

    ValueError, one line that names it: a missing, extra or misshapen tensor, another model type, a truncated file.
    """
    if isinstance(dtype, str):
        named = getattr(torch, dtype, None)
        if not isinstance(named, torch.dtype):
            raise ValueError(f"there is no type {dtype!r}; bfloat16, float16 and float32 are")
        dtype = named
    checkpoint = Checkpoint.open(path)
    tokenizer = CheckpointTokenizer.read(checkpoint.folder)
    SpecialTokens.from_lookup(tokenizer.token_id)  # a tokenizer of another model is told before gigabytes are read
    config = language_config(checkpoint)
    if device_map == "auto":
        device_map = _balanced(config, dtype or torch.bfloat16)
    lm = load_language(checkpoint, dtype, device if device_map is None else device_map)
    first = lm.get_input_embeddings().weight.device
    encoder = load_encoder(checkpoint, dtype, first)
    if side_channel or (side_channel is None and adapter is not None):
        add_side_channel_tokens(lm, tokenizer)
    model: nn.Module = lm if adapter is None else load_adapter(lm, adapter, merge=True)
    return MiniCPMO(model, encoder, tokenizer, name=Path(str(path)).name)


def language_config(checkpoint: Checkpoint) -> Qwen3Config:
    """The language model's sizes, which MiniCPM-o keeps at the top level of its config.json."""
    values = checkpoint.config
    if values.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"{checkpoint.folder}/config.json is of model type {values.get('model_type')!r}, not {MODEL_TYPE!r}: "
            "this loader reads MiniCPM-o 4.5"
        )
    needed = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads",
    )  # fmt: skip
    optional = ("head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "max_position_embeddings")
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{checkpoint.folder}/config.json lacks {missing[0]}: it is not a MiniCPM-o 4.5 checkpoint's")
    if values.get("tie_word_embeddings"):
        raise ValueError(f"{checkpoint.folder}/config.json ties the output matrix to the embedding; 4.5 has both apart")
    rope: dict[str, Any] = values.get("rope_scaling") or {"rope_type": "default"}
    return Qwen3Config(
        **{name: values[name] for name in (*needed, *optional) if values.get(name) is not None},
        rope_parameters={**rope, "rope_theta": values.get("rope_theta", 1e6)},
        tie_word_embeddings=False,
        use_sliding_window=False,
    )


def load_language(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: str | torch.device | DeviceMap
) -> Qwen3ForCausalLM:
    """Stock Qwen3 with the tensors under `llm.`."""
    config = language_config(checkpoint)
    with torch.device("meta"):
        lm = Qwen3ForCausalLM(config)
    checkpoint.load_into(lm, LANGUAGE, dtype, device)
    lm.model.rotary_emb = Qwen3RotaryEmbedding(config).to(lm.get_input_embeddings().weight.device)
    if layer_devices(lm) is not None:
        bridge_devices(lm)
    return lm.eval()


def layer_devices(lm: nn.Module) -> tuple[torch.device, ...] | None:
    """Where each decoder layer lies; None if the whole model is in one place."""
    found = {m.layer_idx: m.q_proj.weight.device for m in lm.modules() if isinstance(m, Qwen3Attention)}
    places = {p.device for p in lm.parameters()}
    return tuple(found[n] for n in sorted(found)) if len(places) > 1 else None


def bridge_devices(lm: Qwen3ForCausalLM) -> None:
    """What a layer, the last norm or the output matrix is given is brought to where its weights are."""

    def bring(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        device = next(module.parameters()).device
        return _moved(args, device), _moved(kwargs, device)

    for module in (*lm.model.layers, lm.model.norm, lm.lm_head):
        module.register_forward_pre_hook(bring, with_kwargs=True)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(v, device) for name, v in value.items()}
    return type(value)(_moved(v, device) for v in value) if type(value) in (tuple, list) else value


def load_encoder(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> StreamingWhisper:
    """Whisper's encoder with the tensors under `apm.`, and the projection after it."""
    values = checkpoint.config.get("audio_config")
    if not isinstance(values, dict):
        raise ValueError(f"{checkpoint.folder}/config.json has no audio_config: this checkpoint has no audio encoder")
    config = whisper_config(values)
    with torch.device("meta"):
        encoder = WhisperEncoder(config)
        projection = Projection(config.d_model, checkpoint.config["hidden_size"])
    checkpoint.load_into(encoder, ENCODER, dtype, device)
    checkpoint.load_into(projection, PROJECTION, dtype, device)
    return StreamingWhisper(encoder, projection, checkpoint.config.get("audio_pool_step", 5))


def _balanced(config: Qwen3Config, dtype: torch.dtype) -> DeviceMap:
    """Layers over all GPUs by their free memory (accelerate's rule); a layer is never split."""
    from accelerate import infer_auto_device_map

    if not torch.cuda.is_available():
        return {"": "cpu"}
    with torch.device("meta"):
        lm = Qwen3ForCausalLM(config).to(dtype)
    return infer_auto_device_map(lm, no_split_module_classes=["Qwen3DecoderLayer"])
