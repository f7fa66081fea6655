"""The embedded default: a small full-duplex model of this project's own, stock Qwen3 behind a convolutional encoder.

A folder holds config.json, tokenizer.json (one token a word) and model.safetensors (float16: `llm.`, `encoder.`,
`adaptor.`).  It speaks the same unit grammar as MiniCPM-o: 13 positions a listening second, 10 of them audio.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from a2t.audio.conv_encoder import Adaptor, ConvEncoder, EncoderConfig, StreamingConvEncoder
from a2t.kv.cache import PackedBatch
from a2t.models.checkpoint import Checkpoint, read_tokenizer
from a2t.models.language import Qwen3OverArena

EMBEDDED = Path(__file__).parent / "embedded"
ADAPTER = EMBEDDED / "adapter"
MODEL_TYPE = "a2t-embedded"
SPECIALS = [
    "<pad>", "<unit>", "</unit>", "<|listen|>", "<|speak|>", "<|tts_bos|>", "<|tts_pad|>", "<|chunk_eos|>",
    "<|chunk_tts_eos|>", "<|turn_eos|>", "<|asr_start|>", "<|asr_end|>",
]  # fmt: skip


@dataclass(frozen=True)
class TinyConfig:
    vocab: int
    hidden: int = 256
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    feed_forward: int = 768
    rope_theta: float = 1e6
    max_positions: int = 65_536
    prompt: str = "i am your helper"
    encoder: EncoderConfig = field(default_factory=EncoderConfig)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TinyConfig:
        values = {k: v for k, v in values.items() if k not in ("model_type", "provenance")}
        return cls(**{**values, "encoder": EncoderConfig(**values["encoder"])})

    def language_config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.feed_forward,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=SPECIALS.index("<|turn_eos|>"),
        )


class WordTokenizer:
    """One token a word; text that it does not know is a ValueError, since the model has no token for it."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._special = {self.token_id(t) for t in SPECIALS}

    @classmethod
    def of_words(cls, words: Sequence[str]) -> WordTokenizer:
        vocab = {w: i for i, w in enumerate([*SPECIALS, *words])}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.decoder = decoders.Fuse()
        return cls(tokenizer)

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        words = [w.strip(".,!?").lower() for w in text.split()]
        unknown = [w for w in words if w and self.token_id(w) is None]
        if unknown:
            raise ValueError(
                f"the embedded model does not know {', '.join(map(repr, unknown))}; it knows {self.size} words"
            )
        return [i for w in words if (i := self.token_id(w)) is not None]

    def decode(self, ids: Sequence[int]) -> str:
        words = (self.tokenizer.id_to_token(i) for i in ids if i not in self._special)
        return " ".join(w for w in words if w is not None)

    def token_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)


class TinyModules(nn.Module):
    """What is trained: encoder, adaptor, stock Qwen3."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        self.config = config
        self.encoder = ConvEncoder(config.encoder, config.vocab)
        self.adaptor = Adaptor(config.encoder.hidden, config.hidden, config.vocab)
        self.llm = Qwen3ForCausalLM(config.language_config())

    def hear(self, h_NE: Tensor) -> Tensor:
        """Encoder states -> what the language model is fed, with the live embedding table (training)."""
        return self.adaptor(h_NE, self.encoder.word_head(h_NE), self.llm.model.embed_tokens.weight)

    def freeze_words(self) -> None:
        """Keeps the embedding table that the adaptor adds, so that an adapter of the language model cannot move it."""
        with torch.no_grad():
            self.adaptor.word_embedding.copy_(self.llm.model.embed_tokens.weight)


class TinyDuplex:
    """DuplexModel (a2t.models.base)."""

    decoding: ClassVar[dict[str, Any]] = {}  # the defaults are its rules

    def __init__(self, modules: TinyModules, tokenizer: WordTokenizer, name: str = "a2t-embedded"):
        self.name, self.tokenizer, self.modules = name, tokenizer, modules.eval()
        self.default_prompt = modules.config.prompt
        self.language = Qwen3OverArena(modules.llm)
        self.shape = self.language.shape
        self.encoder = StreamingConvEncoder(modules.encoder.float(), modules.adaptor.float(), self.shape.dtype)

    @property
    def lm(self) -> Any:
        return self.modules.llm

    @property
    def inv_freq(self) -> Tensor:
        """Rotary frequencies, for policies that re-rotate what stays."""
        return self.language.inv_freq

    def embed(self, ids_T: Tensor) -> Tensor:
        return self.language.embed(ids_T)

    def forward(self, e_TD: Tensor, positions_T: Tensor, batch: PackedBatch) -> Tensor:
        return self.language.forward(e_TD, positions_T, batch)

    def logits(self, h_ND: Tensor) -> Tensor:
        return self.language.logits(h_ND)


def save_modules(modules: TinyModules, tokenizer: WordTokenizer, folder: Path, provenance: dict[str, Any]) -> None:
    """Half precision, safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().half().contiguous() for k, v in modules.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": MODEL_TYPE, **asdict(modules.config), "provenance": provenance}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_modules(folder: Path | None = None, dtype: torch.dtype = torch.float32) -> tuple[TinyModules, WordTokenizer]:
    """Raises ValueError naming what is missing, damaged or does not fit."""
    checkpoint = Checkpoint.open(EMBEDDED if folder is None else folder)
    folder, values = checkpoint.folder, checkpoint.config
    if values.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{checkpoint.where} is of model type {values.get('model_type')!r}, not {MODEL_TYPE!r}")
    tokenizer = read_tokenizer(folder)
    modules = modules_of(checkpoint).to(dtype)
    checkpoint.require(modules, "", dtype=dtype)
    tensors = dict(checkpoint.tensors(checkpoint.names()))
    for name, tensor in tensors.items():
        checkpoint.check_finite(name, tensor)
    modules.load_state_dict(tensors)
    words = WordTokenizer(tokenizer)
    if words.size > modules.config.vocab:
        raise ValueError(
            f"{folder}/tokenizer.json has {words.size} words where config.json's vocab is {modules.config.vocab}"
        )
    return modules, words


def modules_of(checkpoint: Checkpoint) -> TinyModules:
    """The modules that config.json describes, without their weights. ValueError if it describes none."""
    try:
        return TinyModules(TinyConfig.from_json(checkpoint.config))
    except (TypeError, KeyError, ValueError, AttributeError, ZeroDivisionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{checkpoint.where} gives no sizes of a model ({type(error).__name__}: {reason})") from error


def load_tiny(
    folder: Path | str | None = None, adapter: Path | str | None = None, dtype: torch.dtype = torch.float32
) -> TinyDuplex:
    """The embedded default, or another folder of its form. `adapter`: a PEFT folder, merged; None for the base."""
    modules, tokenizer = load_modules(Path(folder) if folder else None, dtype)
    if adapter is not None:
        from a2t.models.adapters import load_adapter

        modules.llm = load_adapter(modules.llm, Path(adapter), merge=True)
    return TinyDuplex(modules, tokenizer)


def random_tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: int) -> TinyDuplex:
    """Random weights over the embedded world's vocabulary size, for tests: `random_tiny(0, layers=2, hidden=64)`."""
    tokenizer = WordTokenizer.of_words([f"w{i}" for i in range(sizes.pop("words", 100))])
    encoder = EncoderConfig(hidden=64, blocks=1, layers=1, heads=2, feed_forward=64)
    small = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "feed_forward": 128} | sizes
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        modules = TinyModules(TinyConfig(vocab=tokenizer.size, prompt="w0 w1", encoder=encoder, **small)).to(dtype)
        for p in modules.parameters():
            p.data += 0.05 * torch.randn_like(p)
    return TinyDuplex(modules, tokenizer)
