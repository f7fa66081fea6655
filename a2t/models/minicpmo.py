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
from a2t.models.checkpoint import Checkpoint, number, read_tokenizer, whole
from a2t.models.hub import locate_adapter
from a2t.models.language import Qwen3OverArena
from a2t.models.whisper_stream import FRAMES, Projection, StreamingWhisper, activation, whisper_config

MODEL_TYPE = "minicpmo"
LANGUAGE, ENCODER, PROJECTION = "llm.", "apm.", "audio_projection_layer."
PARTS = (LANGUAGE, ENCODER, PROJECTION)
DECODING: dict[str, Any] = {
    "first_token_is_text": False, "greedy": False, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
    "repetition_penalty": 1.05, "length_penalty": 1.1,
}  # fmt: skip
"""Where its duplex rules differ from a2t.duplex.decoding.DuplexConfig's defaults.  Source: its streaming decoder."""
PROMPT = "<|im_start|>system\nStreaming Duplex Conversation! You are a helpful assistant.<|im_end|>\n"
MARKER = "\n\nprevious: "

DeviceMap = Mapping[str, str | int]


class CheckpointTokenizer:
    """A checkpoint's tokenizer.json (TextTokenizer of a2t.models.base)."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    @classmethod
    def read(cls, folder: Path) -> CheckpointTokenizer:
        return cls(read_tokenizer(folder))

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
    decoding = DECODING

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
        if not isinstance(named, torch.dtype) or not named.is_floating_point:
            raise ValueError(f"there is no type {dtype!r} for weights; bfloat16, float16 and float32 are")
        dtype = named
    adapter = None if adapter is None else locate_adapter(adapter)
    checkpoint = Checkpoint.open(path, PARTS)
    config = language_config(checkpoint)
    tokenizer = CheckpointTokenizer.read(checkpoint.folder)
    SpecialTokens.from_lookup(tokenizer.token_id)  # a tokenizer of another model is told before gigabytes are read
    if tokenizer.size > config.vocab_size:
        raise ValueError(
            f"{checkpoint.folder}/tokenizer.json has ids up to {tokenizer.size - 1} where config.json's vocab_size is "
            f"{config.vocab_size}: it is another model's"
        )
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
    """The language model's sizes, which MiniCPM-o keeps at the top level of its config.json.  ValueError naming the
    setting that is missing, no size, or not supported."""
    values, where = checkpoint.config, checkpoint.where
    if values.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"{where} is of model type {values.get('model_type')!r}, not {MODEL_TYPE!r}: this reads MiniCPM-o 4.5"
        )
    if values.get("quantization_config"):
        raise ValueError(f"{where} is of a quantized checkpoint: give the one in bfloat16")
    if values.get("tie_word_embeddings"):
        raise ValueError(f"{where} ties the output matrix to the embedding; 4.5 has both apart")
    if values.get("use_sliding_window"):
        raise ValueError(f"{where} asks for sliding windows; every layer of 4.5 sees all that is resident")
    rope = values.get("rope_scaling") or {}
    if not isinstance(rope, dict) or set(rope) - {"rope_type", "type"} or set(rope.values()) - {"default"}:
        raise ValueError(f"{where}: rope_scaling is {rope!r}; only plain rotary positions are supported")
    sizes = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads",
    )  # fmt: skip
    given: dict[str, Any] = {name: whole(values, name, where) for name in sizes}
    given |= {n: whole(values, n, where) for n in ("head_dim", "max_position_embeddings") if values.get(n) is not None}
    heads, kv_heads = given["num_attention_heads"], given["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if "head_dim" not in given and given["hidden_size"] % heads:
        raise ValueError(f"{where}: hidden_size {given['hidden_size']} is no multiple of num_attention_heads {heads}")
    if given.get("head_dim", 2) % 2:
        raise ValueError(f"{where}: head_dim is {given['head_dim']}; rotary positions turn pairs, so it is even")
    return Qwen3Config(
        **{"head_dim": given["hidden_size"] // heads} | given,
        hidden_act=activation(values, "hidden_act", where, "silu"),
        rms_norm_eps=number(values, "rms_norm_eps", where, 1e-6),
        attention_bias=bool(values.get("attention_bias")),
        rope_parameters={"rope_type": "default", "rope_theta": number(values, "rope_theta", where, 1e6)},
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
    encoder, projection, pool = encoder_modules(checkpoint)
    checkpoint.load_into(encoder, ENCODER, dtype, device)
    checkpoint.load_into(projection, PROJECTION, dtype or encoder.conv1.weight.dtype, device)
    return StreamingWhisper(encoder, projection, pool)


def encoder_modules(checkpoint: Checkpoint) -> tuple[WhisperEncoder, Projection, int]:
    """The encoder and the projection, on the meta device, and how many frames an embedding is the mean of.  ValueError
    naming the setting that is wrong."""
    values, where = checkpoint.config, checkpoint.where
    audio = values.get("audio_config")
    if not isinstance(audio, dict):
        raise ValueError(f"{where} has no audio_config: this checkpoint has no audio encoder")
    config = whisper_config(audio, f"{where}, audio_config")
    pool = whole({"audio_pool_step": 5} | values, "audio_pool_step", where)
    if FRAMES % pool:
        raise ValueError(f"{where}: audio_pool_step is {pool}: it must divide the {FRAMES} frames of a unit")
    with torch.device("meta"):
        return WhisperEncoder(config), Projection(config.d_model, whole(values, "hidden_size", where)), pool


def _balanced(config: Qwen3Config, dtype: torch.dtype) -> DeviceMap:
    """Layers over all GPUs by their free memory (accelerate's rule); a layer is never split."""
    from accelerate import infer_auto_device_map

    if not torch.cuda.is_available():
        return {"": "cpu"}
    with torch.device("meta"):
        lm = Qwen3ForCausalLM(config).to(dtype)
    return infer_auto_device_map(lm, no_split_module_classes=["Qwen3DecoderLayer"])
