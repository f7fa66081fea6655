"""A random Qwen3 in float64 and random native sequences with transcripts."""

from __future__ import annotations

import random

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from a2t.distill.sequences import Example
from a2t.duplex.protocol import SpecialTokens

VOCAB, HIDDEN, AUDIO = 40, 32, 3
TOKENS = SpecialTokens(
    unit=1, unit_end=2, listen=3, speak=4, tts_bos=5, tts_pad=6, chunk_eos=7, chunk_tts_eos=8, turn_eos=9,
    asr_start=10, asr_end=11,
)  # fmt: skip
WORDS = range(12, VOCAB)


def make_language(seed: int = 0, dtype: torch.dtype = torch.float64) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(dtype).eval()


def make_example(seed: int, units: int = 6, segments: bool = True, prefix: tuple[int, ...] = (12, 13, 14)) -> Example:
    """Listening, speaking turns over several units, interruptions; with words in most units."""
    rng = random.Random(seed)
    native, texts, speaking = [], [], False
    for _ in range(units):
        if not speaking and rng.random() < 0.5:
            unit = [TOKENS.listen]
        elif speaking and rng.random() < 0.2:
            unit, speaking = [TOKENS.turn_eos, TOKENS.chunk_eos], False
        else:
            unit = ([] if speaking else [TOKENS.speak]) + rng.choices(WORDS, k=rng.randint(1, 3))
            speaking = rng.random() < 0.5
            unit += [TOKENS.chunk_eos] if speaking else [TOKENS.turn_eos, TOKENS.chunk_eos]
        native.append(unit)
        words = rng.choices(WORDS, k=rng.randint(0, 4))
        texts.append(words if segments else None)
    generator = torch.Generator().manual_seed(seed)
    audio = torch.randn(units * AUDIO, HIDDEN, generator=generator, dtype=torch.float64)
    return Example.build(f"e{seed}", prefix, native, texts, audio)


def randomize_adapter(student: torch.nn.Module, seed: int = 0, scale: float = 0.1) -> None:
    """An adapter that does something: LoRA starts with a zero matrix."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in student.parameters():
            if p.requires_grad:
                p += scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)
