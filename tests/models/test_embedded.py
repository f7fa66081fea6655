"""The shipped weights: they load by stock means, are small, hear a sentence and answer it."""

import numpy as np
import pytest
from peft import PeftModel
from scipy.signal import resample_poly

from a2t.data.espeak import Espeak
from a2t.duplex.engine import ConversationConfig, Engine, EngineConfig
from a2t.models.tiny import ADAPTER, EMBEDDED, load_modules, load_tiny


def test_stock_peft_loads_the_adapter() -> None:
    modules, _ = load_modules()
    model = PeftModel.from_pretrained(modules.llm, str(ADAPTER))
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (16, 32)
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} == set(config.target_modules)


def test_size() -> None:
    assert (EMBEDDED / "model.safetensors").stat().st_size < 24e6
    modules, tokenizer = load_modules()
    assert 7.9e6 < sum(p.numel() for p in modules.parameters()) < 12e6
    assert modules.llm.lm_head.weight is not modules.llm.model.embed_tokens.weight
    assert 200 <= tokenizer.size - 12 <= 400


@pytest.mark.parametrize(
    ("said", "voice", "answer"),
    [("turn on the light", "en-us+f2", "okay the light is on"), ("set a timer", "en-us+m3", "okay the timer is set")],
)
def test_it_hears_and_answers(said: str, voice: str, answer: str) -> None:
    speech = resample_poly(Espeak().say(said, voice, 160).pcm_S, 320, 441).astype(np.float32) * 0.5
    pcm = np.concatenate([np.zeros(6400, np.float32), speech, np.zeros(5 * 16000, np.float32)])
    pcm += np.random.default_rng(0).standard_normal(len(pcm)).astype(np.float32) * 1e-3
    # without a time budget: what is written must not depend on how busy the machine is
    engine = Engine(load_tiny(adapter=ADAPTER), config=EngineConfig(side_channel_budget_s=None))
    engine.push(engine.open(ConversationConfig()), pcm)
    units = [result for _, result, _ in engine.run()]
    assert " ".join(u.response_text for u in units if u.response_text) == answer
    heard = " ".join(u.transcript_text for u in units if u.transcript_text).split()
    assert len(set(heard) & set(said.split())) >= len(said.split()) - 1
