import json
from pathlib import Path

import pytest
import torch

from a2t.duplex.protocol import SpecialTokens
from a2t.models import tiny


def test_saved_and_loaded_alike(tmp_path: Path) -> None:
    model = tiny.random_tiny(0)
    tiny.save_modules(model.modules, model.tokenizer, tmp_path, {"made_by": "a test"})
    loaded = tiny.load_tiny(tmp_path)
    for (name, a), (_, b) in zip(model.modules.state_dict().items(), loaded.modules.state_dict().items(), strict=True):
        assert torch.equal(a.half().float(), b), name
    assert loaded.tokenizer.encode("w3 w1") == model.tokenizer.encode("w3 w1")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    model = tiny.random_tiny(0)
    tiny.save_modules(model.modules, model.tokenizer, tmp_path, {})
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=name):
        tiny.load_tiny(tmp_path)


def test_another_model_type_is_refused(tmp_path: Path) -> None:
    model = tiny.random_tiny(0)
    tiny.save_modules(model.modules, model.tokenizer, tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ValueError, match="'llama'"):
        tiny.load_tiny(tmp_path)


def test_tokenizer_speaks_the_protocol() -> None:
    tokenizer = tiny.random_tiny(0).tokenizer
    tokens = SpecialTokens.from_lookup(tokenizer.token_id)
    assert tokens.has_side_channel and len(tokens.control) == 11
    ids = tokenizer.encode("W5, w7!")
    assert tokenizer.decode([tokens.unit, *ids, tokens.turn_eos]) == "w5 w7"
    with pytest.raises(ValueError, match="'zebra'"):
        tokenizer.encode("w1 zebra")
