"""Loading: shards or one file, only what is asked for, and one clear error for each kind of damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from a2t.models.checkpoint import Checkpoint, device_of
from a2t.models.minicpmo import load_encoder, load_language, load_minicpmo

GOLDEN = Path(__file__).parent.parent / "data" / "minicpmo-duplex"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of its own, one file, that a test may damage."""
    made = tmp_path / "checkpoint"
    made.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / name, made / name)
    return made


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path, prefix: str) -> None:
    """Splits the one file into shards with an index: a.safetensors holds what begins with `prefix`, b.safetensors the
    rest, and the vision shard is garbage that nobody may open."""
    tensors = load_file(folder / "model.safetensors")
    weights: dict[str, str] = {"vpm.embeddings.weight": "vision.safetensors"}
    for name, inside in (("a.safetensors", True), ("b.safetensors", False)):
        here = {key: tensor for key, tensor in tensors.items() if key.startswith(prefix) is inside}
        save_file(here, folder / name)
        weights |= dict.fromkeys(here, name)
    (folder / "model.safetensors").unlink()
    (folder / "vision.safetensors").write_bytes(b"not to be read")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def test_shards_and_one_file_hold_the_same_model_and_other_parts_are_not_opened(folder: Path) -> None:
    whole = load_minicpmo(folder)
    expected = {n: p.clone() for n, p in whole.lm.state_dict().items()}
    shard(folder, "llm.model.layers.0")
    found = load_minicpmo(folder)
    assert found.lm.state_dict().keys() == expected.keys()
    assert all(torch.equal(p, expected[n]) for n, p in found.lm.state_dict().items())
    assert torch.equal(found.encoder.encoder.conv1.weight, whole.encoder.encoder.conv1.weight)
    assert not any(p.requires_grad for p in found.lm.parameters())


def test_weights_are_the_mapped_file_until_another_dtype_is_asked_for(folder: Path) -> None:
    lm = load_language(Checkpoint.open(folder), None, "cpu")
    path = str((folder / "model.safetensors").resolve())
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(path)]
    start = lm.lm_head.weight.data_ptr()
    assert any(int(a, 16) <= start < int(b, 16) for a, b in spans)
    half = load_minicpmo(folder, dtype=torch.bfloat16)
    assert half.shape.dtype == half.encoder.dtype == torch.bfloat16
    assert half.inv_freq.dtype == torch.float32  # angles stay exact whatever the weights are
    assert torch.equal(half.language.lm_head.weight, lm.lm_head.weight.bfloat16())


def damaged(folder: Path, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        load_minicpmo(folder)
    assert "\n" not in str(error.value)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("llm.model.layers.1.mlp.up_proj.weight"))
    damaged(folder, "lacks tensor llm.model.layers.1.mlp.up_proj.weight")


def test_an_extra_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"llm.model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    damaged(folder, "unknown tensor llm.model.layers.0.self_attn.q_proj.bias")


def test_a_misshapen_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"apm.conv2.weight": torch.zeros(64, 64, 5)}))
    damaged(folder, r"apm.conv2.weight of shape \[64, 64, 5\] where config.json asks for \[64, 64, 3\]")


def test_a_missing_part_is_named(folder: Path) -> None:
    rewrite(folder, lambda t: [t.pop(k) for k in list(t) if k.startswith("audio_projection_layer.")])
    damaged(folder, "no tensor under 'audio_projection_layer.'")


def test_another_model_type_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2_audio"}))
    damaged(folder, "model type 'qwen2_audio', not 'minicpmo'")


@pytest.mark.parametrize("left", [5, 400, 1_000_000])
def test_a_truncated_file_is_named(folder: Path, left: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    damaged(folder, "model.safetensors cannot be read as safetensors .*truncated")


def test_a_missing_shard_and_a_lying_index_are_named(folder: Path) -> None:
    shard(folder, "llm.")
    (folder / "a.safetensors").rename(folder / "kept")
    damaged(folder, "lacks a.safetensors, which its index names")
    (folder / "kept").rename(folder / "a.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["llm.lm_head.weight"] = "b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    damaged(folder, "b.safetensors lacks llm.lm_head.weight")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "is no JSON"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("model.safetensors", None, "neither model.safetensors nor"),
    ],
)
def test_a_missing_or_damaged_file_is_named(folder: Path, name: str, text: str | None, said: str) -> None:
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    damaged(folder, said)


def test_a_place_that_is_no_folder_is_named(tmp_path: Path, folder: Path) -> None:
    damaged(tmp_path / "nowhere", "there is no such folder")
    damaged(folder / "config.json", "is a file")


def test_the_real_sizes_are_read_without_the_weights(folder: Path) -> None:
    """The configuration of MiniCPM-o 4.5 gives Qwen3-8B's language model."""
    from a2t.models.minicpmo import language_config

    checkpoint = Checkpoint.open(folder)
    checkpoint.config |= {
        "vocab_size": 151_748, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    config = language_config(checkpoint)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert set(config.layer_types) == {"full_attention"} and not config.tie_word_embeddings


def test_a_device_map_places_by_the_longest_name() -> None:
    places: dict[str, str | int] = {"": "cpu", "model.layers.1": "meta", "model.layers.10": 0}
    assert device_of("model.layers.1.mlp.up_proj.weight", places) == "meta"
    assert device_of("model.layers.10.mlp.up_proj.weight", places) == 0
    assert device_of("lm_head.weight", places) == "cpu"
    with pytest.raises(ValueError, match="nothing places lm_head.weight"):
        device_of("lm_head.weight", {"model": "cpu"})


def test_the_encoder_alone_can_be_loaded(folder: Path) -> None:
    rewrite(folder, lambda t: [t.pop(k) for k in list(t) if k.startswith("llm.")])
    assert load_encoder(Checkpoint.open(folder)).embeddings_per_unit == 10
