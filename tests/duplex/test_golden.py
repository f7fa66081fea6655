"""MiniCPM-o's own duplex loop, recorded: 40 units on a tiny checkpoint, replayed through this engine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import ConversationConfig, Engine, EngineConfig
from a2t.models.language import Qwen3OverArena

FOLDER = Path(__file__).parent.parent / "data" / "minicpmo-duplex"
QWEN3 = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "attention_bias",
)  # fmt: skip


class Recorded:
    """An encoder that gives the recorded embeddings, a unit each second."""

    embeddings_per_unit, samples_per_unit = 10, 16000

    def __init__(self, embeds: list[torch.Tensor]):
        self.embeds = embeds

    def new_state(self) -> Any:
        state = SimpleNamespace(units_ready=0, taken=0, nbytes=0)

        def push(pcm_S: np.ndarray) -> None:
            state.units_ready += len(pcm_S) // 16000

        state.push = push
        return state

    def encode(self, states: list[Any]) -> torch.Tensor:
        out = torch.stack([self.embeds[state.taken] for state in states])
        for state in states:
            state.taken, state.units_ready = state.taken + 1, state.units_ready - 1
        return out


class GoldenModel:
    """Stock Qwen3 with the checkpoint's `llm.` tensors; notes all logits asked for."""

    name, default_prompt = "golden", ""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        qwen = Qwen3ForCausalLM(Qwen3Config(**{k: config[k] for k in QWEN3}, rope_parameters=rope))
        with safe_open(folder / "model.safetensors", "pt") as f:
            weights = {k.removeprefix("llm."): f.get_tensor(k) for k in f.keys() if k.startswith("llm.")}  # noqa: SIM118
        qwen.load_state_dict(weights, strict=True)
        over_arena = Qwen3OverArena(qwen)
        self.shape, self.embed, self.forward = over_arena.shape, over_arena.embed, over_arena.forward
        self._logits = over_arena.logits
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer = SimpleNamespace(
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
            token_id=tokenizer.token_to_id,
        )
        with safe_open(folder / "expected.safetensors", "pt") as f:
            self.expected = {k: f.get_tensor(k) for k in f.keys() if not k.startswith("mel.")}  # noqa: SIM118
        self.encoder = Recorded([self.expected[f"audio_embeds.{n}"] for n in range(40)])
        self.asked: list[torch.Tensor] = []

    def logits(self, h_ND: torch.Tensor) -> torch.Tensor:
        out = self._logits(h_ND)
        self.asked += list(out.clone())
        return out


def test_forty_units_are_identical():
    model = GoldenModel(FOLDER)
    expected = json.loads((FOLDER / "expected.json").read_text())
    lengths: list[int] = []
    engine = Engine(
        model,
        config=EngineConfig(side_channel_budget_s=None),
        observer=lambda c, *_: lengths.append(c.ledger.residents),
    )
    duplex = DuplexConfig.minicpmo(
        greedy=True, max_new_speak_tokens_per_chunk=12, repetition_penalty=1.0, length_penalty=1.0
    )
    config = ConversationConfig(None, "unbounded", duplex=duplex, system_prompt=expected["system_prompt"])
    conversation = engine.open(config)
    engine.run()
    assert conversation.ledger.residents == expected["system_len"]
    worst = 0.0
    for n, unit in enumerate(expected["units"]):
        model.asked.clear()
        lengths.clear()
        before = conversation.ledger.residents
        engine.push(conversation, np.zeros(16000, np.float32), force_listen=unit["force_listen"])
        ((_, result, _),) = engine.run()
        said = {
            "unit": result.unit,
            "force_listen": unit["force_listen"],
            "is_listen": result.listening,
            "end_of_turn": result.end_of_turn,
            "fed_ids": [*result.native_ids, engine.tokens.unit_end],
            "kv_before": before,
            "kv_after_prefill": lengths[0],
            "kv_after": conversation.ledger.residents,
            "audio_kv": unit["audio_kv"],
            "text": result.response_text,
        }
        assert said == unit
        steps = model.expected.get(f"step_logits.{n}", model.expected[f"decision_logits.{n}"][None])
        asked = torch.stack(model.asked[: len(steps)])
        worst = max(worst, float((asked - steps).abs().max()))
        torch.testing.assert_close(asked, steps, rtol=0, atol=1e-4)
        assert len(result.speech_ids) == (0 if result.speech_hidden_ND is None else len(result.speech_hidden_ND))
    assert 0 < worst < 1e-4
