"""Checkpoints damaged in dozens of ways: each is told in one line that names the tensor, the setting or the file, with
exit code 1, by `a2t stream` before it streams anything."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from a2t.cli import main
from a2t.models.tiny import random_tiny, save_modules

GOLDEN = Path(__file__).parent.parent / "data" / "minicpmo-duplex"
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
Q, NORM, CONV = "llm.model.layers.0.self_attn.q_proj.weight", "llm.model.norm.weight", "apm.conv1.weight"
Damage = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoint"
    made.mkdir()
    for name in (CONFIG, TOKENIZER, WEIGHTS):
        shutil.copyfile(GOLDEN / name, made / name)
    return made


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        change(held)
        save_file(held, folder / WEIGHTS)

    return damage


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return tensors(lambda held: held.update({name: make(held[name]).contiguous()}))


def spoilt(name: str, value: float) -> Damage:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return put(name, make)


def config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        values = json.loads((folder / CONFIG).read_text())
        for name, value in changes.items():
            target = values["audio_config"] if name.startswith("audio_config.") else values
            target[name.removeprefix("audio_config.")] = value
        (folder / CONFIG).write_text(json.dumps(values))

    return damage


def audio(**changes: Any) -> Damage:
    return config(**{f"audio_config.{name}": value for name, value in changes.items()})


def without(*names: str) -> Damage:
    def damage(folder: Path) -> None:
        values = json.loads((folder / CONFIG).read_text())
        for name in names:
            del values[name]
        (folder / CONFIG).write_text(json.dumps(values))

    return damage


def file(name: str, content: bytes | None) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)

    return damage


def cut(left: int) -> Damage:
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:left])


def index(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Two shards and an index that `change` has falsified."""

    def damage(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        weights: dict[str, Any] = {}
        for name, inside in (("a.safetensors", True), ("b.safetensors", False)):
            here = {key: tensor for key, tensor in held.items() if key.startswith("llm.") is inside}
            save_file(here, folder / name)
            weights |= dict.fromkeys(here, name)
        whole = {"metadata": {}, "weight_map": weights}
        change(whole)
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(whole))

    return damage


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        values = json.loads((folder / TOKENIZER).read_text())
        change(values)
        (folder / TOKENIZER).write_text(json.dumps(values))

    return damage


def rename(values: dict[str, Any], old: str) -> None:
    for token in values["added_tokens"]:
        if token["content"] == old:
            token["content"] = "<|another|>"


HEADER = struct.pack("<Q", 2**60) + b"{" * 100
KINDS: dict[str, tuple[Damage, str]] = {
    "a language tensor is missing": (tensors(lambda t: t.pop(Q)), f"lacks tensor {Q}"),
    "the last norm is missing": (tensors(lambda t: t.pop(NORM)), f"lacks tensor {NORM}"),
    "the embedding is missing": (tensors(lambda t: t.pop("llm.model.embed_tokens.weight")), "embed_tokens.weight"),
    "an encoder tensor is missing": (tensors(lambda t: t.pop(CONV)), f"lacks tensor {CONV}"),
    "a projection tensor is missing": (
        tensors(lambda t: t.pop("audio_projection_layer.linear2.bias")), "audio_projection_layer.linear2.bias"),
    "no language model": (tensors(lambda t: [t.pop(k) for k in list(t) if k[:4] == "llm."]), "under 'llm.'"),
    "no encoder": (tensors(lambda t: [t.pop(k) for k in list(t) if k[:4] == "apm."]), "under 'apm.'"),
    "a tensor too many": (tensors(lambda t: t.update({"llm.x": torch.zeros(1)})), "unknown tensor llm.x"),
    "a layer too many": (
        tensors(lambda t: t.update({Q.replace("s.0", "s.9"): torch.zeros(2, 2)})), "unknown tensor llm.model.layers.9"),
    "an encoder tensor too many": (tensors(lambda t: t.update({"apm.x": torch.zeros(1)})), "unknown tensor apm.x"),
    "transposed": (put(Q, lambda x: x[:, :-1]), f"has tensor {Q} of shape"),
    "flattened": (put(CONV, lambda x: x.reshape(-1)), f"has tensor {CONV} of shape"),
    "a scalar": (put(NORM, lambda x: x[0]), f"has tensor {NORM} of shape []"),
    "integers": (put(NORM, lambda x: x.long()), f"has tensor {NORM} of type int64"),
    "bytes": (put(CONV, lambda x: x.byte()), f"has tensor {CONV} of type uint8"),
    "eight bits": (put(Q, lambda x: x.to(torch.float8_e4m3fn)), f"has tensor {Q} of type float8_e4m3fn"),
    "mixed types": (put(Q, lambda x: x.half()), f"has tensor {Q} in float16 and most others in float32"),
    "NaN in the language model": (spoilt(Q, float("nan")), f"{Q} holds values that are not finite"),
    "infinity in the encoder": (spoilt(CONV, float("inf")), f"{CONV} holds values that are not finite"),
    "NaN in the projection": (
        spoilt("audio_projection_layer.linear1.bias", float("nan")), "linear1.bias holds values that are not finite"),
    "cut in its header's length": (cut(5), f"{WEIGHTS} cannot be read as safetensors"),
    "cut in its header": (cut(400), f"{WEIGHTS} cannot be read as safetensors"),
    "cut in its tensors": (cut(1_000_000), f"{WEIGHTS} cannot be read as safetensors"),
    "cut by a byte": (lambda f: cut((f / WEIGHTS).stat().st_size - 1)(f), f"{WEIGHTS} cannot be read"),
    "bytes after the end": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes() + b"x"), f"{WEIGHTS} cannot be read"),
    "empty weights": (file(WEIGHTS, b""), f"{WEIGHTS} cannot be read"),
    "no header": (file(WEIGHTS, HEADER), f"{WEIGHTS} cannot be read"),
    "text for weights": (file(WEIGHTS, b"<html>404</html>" * 9), f"{WEIGHTS} cannot be read"),
    "a pointer for weights": (
        file(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "Git LFS pointer"),
    "no weights": (file(WEIGHTS, None), f"has neither {WEIGHTS} nor"),
    "no config": (file(CONFIG, None), "has no config.json"),
    "empty config": (file(CONFIG, b""), "config.json is no JSON"),
    "cut config": (file(CONFIG, b'{"model_type": "minic'), "config.json is no JSON"),
    "binary config": (file(CONFIG, b"\xff\xfe\x00"), "config.json is no JSON"),
    "a list for config": (file(CONFIG, b"[]"), "config.json is not a JSON object"),
    "no model type": (without("model_type"), "config.json has no model_type"),
    "another model type": (config(model_type="llama"), "model type 'llama'"),
    "a number for model type": (config(model_type=4), "config.json has no model_type"),
    "no width": (without("hidden_size"), "config.json lacks hidden_size"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "width as text": (config(hidden_size="64"), "hidden_size is '64'"),
    "width broken": (config(hidden_size=64.5), "hidden_size is 64.5"),
    "width negative": (config(hidden_size=-64), "hidden_size is -64"),
    "true for a width": (config(intermediate_size=True), "intermediate_size is True"),
    "another width": (config(hidden_size=32), "where config.json asks for"),
    "a layer more": (config(num_hidden_layers=4), "lacks tensor llm.model.layers.3"),
    "a layer less": (config(num_hidden_layers=2), "unknown tensor llm.model.layers.2"),
    "another vocabulary": (config(vocab_size=300), "asks for [300, 64]"),
    "a vocabulary below the tokenizer's": (config(vocab_size=200), "tokenizer.json has ids up to 280"),
    "heads that do not divide": (config(num_key_value_heads=3), "no multiple of num_key_value_heads 3"),
    "odd heads": (config(head_dim=15), "head_dim is 15"),
    "unknown activation": (config(hidden_act="silly"), "hidden_act is 'silly'"),
    "no epsilon": (config(rms_norm_eps="small"), "rms_norm_eps is 'small'"),
    "negative theta": (config(rope_theta=-1), "rope_theta is -1"),
    "scaled rotary": (config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope_scaling is"),
    "tied": (config(tie_word_embeddings=True), "ties the output matrix"),
    "sliding": (config(use_sliding_window=True), "sliding windows"),
    "quantized": (config(quantization_config={"bits": 4}), "quantized"),
    "no audio config": (without("audio_config"), "has no audio_config"),
    "a list for audio config": (config(audio_config=[]), "has no audio_config"),
    "no encoder width": (audio(d_model=None), "audio_config lacks d_model"),
    "another encoder width": (audio(d_model=32), "where config.json asks for"),
    "encoder heads": (audio(encoder_attention_heads=7), "no multiple of encoder_attention_heads 7"),
    "encoder layers": (audio(encoder_layers=9), "lacks tensor apm.layers"),
    "encoder activation": (audio(activation_function="x"), "activation_function is 'x'"),
    "short encoder": (audio(max_source_positions=50), "max_source_positions is 50"),
    "another encoder length": (audio(max_source_positions=700), "apm.embed_positions.weight of shape"),
    "mel bins": (audio(num_mel_bins=128), "apm.conv1.weight of shape"),
    "pooling of nothing": (config(audio_pool_step=0), "audio_pool_step is 0"),
    "pooling that does not divide": (config(audio_pool_step=7), "audio_pool_step is 7"),
    "no tokenizer": (file(TOKENIZER, None), "has no tokenizer.json"),
    "empty tokenizer": (file(TOKENIZER, b""), "tokenizer.json cannot be read"),
    "an object for tokenizer": (file(TOKENIZER, b"{}"), "tokenizer.json cannot be read"),
    "a tokenizer without <unit>": (tokenizer(lambda t: rename(t, "<unit>")), "<unit>"),
    "a tokenizer without <|listen|>": (tokenizer(lambda t: rename(t, "<|listen|>")), "<|listen|>"),
    "no map in the index": (index(lambda i: i.pop("weight_map")), "has no weight_map"),
    "an empty map": (index(lambda i: i.update(weight_map={})), "has no weight_map"),
    "a list for a map": (index(lambda i: i.update(weight_map=[1])), "has no weight_map"),
    "numbers in the map": (index(lambda i: i["weight_map"].update({Q: 3})), f"places {Q} in 3"),
    "a map that leaves the folder": (
        index(lambda i: i["weight_map"].update({Q: "../a.safetensors"})), f"places {Q} in '../a.safetensors'"),
    "a shard that is missing": (
        index(lambda i: i["weight_map"].update({Q: "c.safetensors"})), "lacks c.safetensors, which its index names"),
    "the wrong shard": (index(lambda i: i["weight_map"].update({Q: "b.safetensors"})), f"a.safetensors holds {Q}"),
    "an index without a tensor": (index(lambda i: i["weight_map"].pop(Q)), f"holds {Q}, which the index does not"),
    "an index with a tensor too many": (
        index(lambda i: i["weight_map"].update({"llm.x": "a.safetensors"})), "a.safetensors lacks llm.x"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_minicpmo(kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, said = KINDS[kind]
    damage(folder)
    told(folder, said, capsys)


TINY: dict[str, tuple[Damage, str]] = {
    "a tensor is missing": (tensors(lambda t: t.pop("llm.lm_head.weight")), "lacks tensor llm.lm_head.weight"),
    "a tensor too many": (tensors(lambda t: t.update({"x": torch.zeros(1)})), "unknown tensor x"),
    "misshapen": (put("llm.lm_head.weight", lambda x: x[1:]), "has tensor llm.lm_head.weight of shape"),
    "NaN": (spoilt("llm.lm_head.weight", float("nan")), "llm.lm_head.weight holds values"),
    "cut": (cut(5000), f"{WEIGHTS} cannot be read"),
    "no sizes": (without("encoder"), "gives no sizes of a model"),
    "an unknown setting": (config(colour="red"), "gives no sizes of a model"),
    "no tokenizer": (file(TOKENIZER, None), "has no tokenizer.json"),
    "another vocabulary": (config(vocab=5), "where config.json asks for"),
}


@pytest.mark.parametrize("kind", TINY)
def test_the_embedded_form(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_tiny(3)
    save_modules(model.modules, model.tokenizer, tmp_path / "tiny", {})
    damage, said = TINY[kind]
    damage(tmp_path / "tiny")
    told(tmp_path / "tiny", said, capsys)


def told(folder: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    talk = folder.parent / "talk.wav"
    if not talk.is_file():
        import numpy as np

        from a2t.audio.files import write_wav

        write_wav(talk, np.zeros(16_000, np.float32))
    assert main(["stream", str(talk), "--model", str(folder)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("a2t stream: ")
    assert printed.err.count("\n") == 1 and said in printed.err, printed.err
