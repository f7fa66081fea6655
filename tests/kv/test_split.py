"""An arena over several devices does what one over one device does, operation by operation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from a2t.kv.cache import KVArena
from a2t.kv.split import SplitArena, make_arena
from a2t.models.language import Qwen3OverArena
from a2t.models.minicpmo import _moved, bridge_devices, layer_devices

# The CPU under two names: what is tested is which arena a layer's keys go to, not the copying between devices.
CPU, OTHER = torch.device("cpu"), torch.device("cpu", 0)


def language(stock: bool) -> Qwen3OverArena:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    lm = Qwen3ForCausalLM(config).double()
    bridge_devices(lm)
    return Qwen3OverArena(lm, stock)


def test_a_split_arena_holds_and_answers_what_a_whole_one_does() -> None:
    model = language(stock=True)
    shape = replace(model.shape, layer_devices=(CPU, CPU, OTHER, OTHER))
    whole, split = make_arena(model.shape, 3, 64), make_arena(shape, 3, 64)
    assert type(whole) is KVArena and isinstance(split, SplitArena) and [len(p.parts) for p in [split]] == [2]
    generator = torch.Generator().manual_seed(1)
    rows = [[a.allocate() for _ in range(2)] for a in (whole, split)]
    assert rows[0] == rows[1] and whole.free_rows == split.free_rows == 1
    first, second = rows[0]
    position = 0
    for step, counts in enumerate(((9, 4), (1, 1), (5, 1), (1, 3))):
        ids = torch.randint(0, 40, (sum(counts),), generator=generator)
        positions = torch.arange(position, position + sum(counts))
        position += sum(counts)
        found = [model.forward(model.embed(ids), positions, a.pack([first, second], counts)) for a in (whole, split)]
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)
        for arena in (whole, split):
            if step == 1:
                arena.drop(first, (0, 3, 4))
            if step == 2:
                arena.rotate(second, [1, 2], -1, model.inv_freq)
                arena.extend(second, arena.gather(first, [2, 0]))
        assert whole.lengths == split.lengths and whole.nbytes_resident(first) == split.nbytes_resident(first)
        for row in (first, second):
            a, b = whole.export(row), split.export(row)
            assert torch.equal(a["keys"], b["keys"]) and torch.equal(a["values"], b["values"])
    saved = whole.export(first)
    split.release(first)
    split.load(split.allocate(), saved)
    assert torch.equal(split.export(first)["values"], saved["values"])
    with pytest.raises(ValueError, match="3 saved layers"):
        split.load(first, {name: t[:3] for name, t in saved.items()})


def test_what_a_layer_is_given_comes_to_its_device() -> None:
    model = language(stock=True)
    assert layer_devices(model.model) is None
    model.backbone.layers[2].to("meta")
    assert layer_devices(model.model) == (CPU, CPU, torch.device("meta"), CPU)
    given = {"x": torch.zeros(1), "pair": (torch.ones(2), None), "n": 3}
    moved = _moved(given, torch.device("meta"))
    assert moved["x"].device.type == moved["pair"][0].device.type == "meta" and moved["pair"][1] is None
    assert moved["n"] == 3
