"""What `a2t doctor` says of whole, damaged and foreign checkpoints; its memory figures against allocated tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from a2t import cli
from a2t.duplex.conversation import ConversationConfig
from a2t.duplex.engine import Engine, EngineConfig
from a2t.models.memory import on_paper
from a2t.models.tiny import random_tiny, save_modules

GOLDEN = Path(__file__).parent.parent / "data"


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["doctor", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_whole_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = doctor(capsys, str(GOLDEN / "minicpmo-duplex"), "--json", "--conversations", "3")
    found = json.loads(out)
    assert code == 0 and not found["missing"]
    assert [p["prefix"] for p in found["parts"]] == ["llm.", "apm.", "audio_projection_layer."]
    assert sum(p["tensors"] for p in found["parts"]) == 77
    memory = found["memory"]
    assert memory["weights"] == sum(p["bytes"] for p in found["parts"])
    assert memory["bytes_per_position"] == 2 * 3 * 2 * 16 * 4
    assert memory["total"] == memory["weights"] + 3 * memory["conversation"]
    assert any("matrices grow" in note for note in found["notes"])
    code, out, _ = doctor(capsys, str(GOLDEN / "minicpmo-duplex"), "--dtype", "bf16")
    assert code == 0 and "nothing is missing" in out and "language model (Qwen3)" in out


def test_what_is_missing_is_said_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / "minicpmo-duplex" / name, folder / name)
    tensors = load_file(folder / "model.safetensors")
    tensors["vpm.patch.weight"] = tensors.pop("apm.conv1.bias")
    save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").unlink()
    code, out, _ = doctor(capsys, str(folder))
    assert code == 1
    assert "lacks tensor apm.conv1.bias" in out and "has no tokenizer.json" in out and "vision, not used" in out


def test_what_is_no_checkpoint_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setup, said in (
        (lambda: None, "has no config.json"),
        (lambda: (tmp_path / "config.json").write_text('{"model_type": "llama"}'), "model type 'llama'"),
        (lambda: (tmp_path / "config.json").write_text('{"model_type": "minicpmo"}'), "neither model.safetensors"),
    ):
        setup()
        code, _, err = doctor(capsys, str(tmp_path))
        assert code == 1 and said in err and err.count("\n") == 1


def test_published_memory_of_a_conversation() -> None:
    """MiniCPM-o 4.5 in bf16: 147,456 bytes a position, 0.62 GB at 4,192 positions (language model)."""
    config = {
        "model_type": "minicpmo", "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_size": 4096,
        "audio_config": {"encoder_layers": 24, "d_model": 1024, "max_source_positions": 1500, "num_mel_bins": 80},
    }  # fmt: skip
    paper = on_paper(config, torch.bfloat16)
    assert paper.bytes_per_position == 147_456
    assert round(4192 * paper.bytes_per_position / 1e9, 2) == 0.62
    assert paper.encoder_cache == 1450 * 2 * 24 * 1024 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_embedded_models_memory_is_what_its_tensors_take(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_tiny(0, dtype)
    save_modules(model.modules, model.tokenizer, tmp_path, {})
    paper = on_paper(json.loads((tmp_path / "config.json").read_text()), dtype)
    engine = Engine(model, 1, 1024, config=EngineConfig(side_channel_budget_s=None))
    conversation = engine.open(ConversationConfig(budget=100))
    for unit in range(8):
        engine.push(conversation, np.random.default_rng(unit).normal(0, 0.1, 16_000).astype(np.float32))
        engine.run()
    engine.settle(conversation)
    kv = sum(t.nbytes for t in engine.arena.export(conversation.row).values())
    tensors, _ = conversation.encoder_state.export()
    held = kv + sum(t.nbytes for t in tensors.values())
    assert held == pytest.approx(paper.conversation(conversation.ledger.residents), rel=0.02)
    assert conversation.encoder_state.nbytes == pytest.approx(paper.fixed, rel=0.02)
    assert doctor(capsys, str(tmp_path))[0] == 0
