"""Adapters: PEFT's own reading of what we write, and the size that the paper tells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from a2t.models import adapters


class Words:
    def __init__(self, size: int) -> None:
        self.ids = {f"w{n}": n for n in range(size - 1)} | {"</unit>": size - 1}

    def token_id(self, token: str) -> int | None:
        return self.ids.get(token)

    def add_tokens(self, tokens: Sequence[str]) -> list[int]:
        for token in tokens:
            self.ids[token] = len(self.ids)
        return [self.ids[t] for t in tokens]


def model(rows: int = 50, seed: int = 0, hidden: int = 32) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=rows, hidden_size=hidden, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double().eval()


def trained(seed: int, rows: int = 50) -> PeftModel:
    """An adapter with random weights everywhere."""
    wrapped = adapters.new_adapter(model(rows), [rows - 2, rows - 1])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in wrapped.parameters():
            if p.requires_grad:
                p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return wrapped.eval()


IDS = torch.tensor([[1, 48, 3, 49, 7]])


def logits(lm: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return lm(IDS).logits


@pytest.mark.parametrize(("known", "rows"), [(48, 50), (49, 51), (50, 52), (40, 50)])
def test_spare_rows_are_reused_and_the_matrices_grow_only_where_there_are_none(known: int, rows: int) -> None:
    lm, words = model(), Words(known)
    before = lm.lm_head.weight.detach().clone()
    start, end = adapters.add_side_channel_tokens(lm, words)
    assert (start, end) == (known, known + 1)
    assert lm.lm_head.weight.shape[0] == lm.model.embed_tokens.weight.shape[0] == lm.config.vocab_size == rows
    torch.testing.assert_close(lm.lm_head.weight[:known], before[:known], rtol=0, atol=0)
    for matrix in (lm.lm_head.weight, lm.model.embed_tokens.weight):
        assert torch.equal(matrix[start], matrix[known - 1]) and torch.equal(matrix[end], matrix[known - 1])
    assert adapters.add_side_channel_tokens(lm, words) == (start, end)  # a second call changes nothing


def test_a_fresh_adapter_changes_nothing_and_trains_only_itself() -> None:
    wrapped = adapters.new_adapter(model(), [48, 49])
    assert torch.equal(logits(wrapped.eval()), logits(model()))
    trainable = {n for n, p in wrapped.named_parameters() if p.requires_grad}
    assert trainable and all("lora_" in n or "trainable_tokens" in n for n in trainable)


def test_peft_reads_what_we_save_and_merging_gives_the_same_logits(tmp_path: Path) -> None:
    wrapped = trained(1)
    expected = logits(wrapped)
    adapters.save_adapter(wrapped, tmp_path / "a")
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    stock = PeftModel.from_pretrained(model(), str(tmp_path / "a")).eval()
    torch.testing.assert_close(logits(stock), expected, rtol=0, atol=1e-12)
    merged = adapters.load_adapter(model(), tmp_path / "a")
    assert type(merged) is Qwen3ForCausalLM
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-12)
    assert (expected - logits(model())).abs().max() > 0.1


def test_merge_and_unmerge_return_to_the_base(tmp_path: Path) -> None:
    adapters.save_adapter(trained(1), tmp_path / "a")
    wrapped = adapters.load_adapter(model(), tmp_path / "a", merge=False)
    expected = logits(wrapped)
    adapters.merge_adapter(wrapped)
    torch.testing.assert_close(logits(wrapped), expected, rtol=0, atol=1e-12)
    adapters.unmerge_adapter(wrapped)
    with wrapped.disable_adapter():
        torch.testing.assert_close(logits(wrapped), logits(model()), rtol=0, atol=1e-12)


def test_several_adapters_serve_from_one_base(tmp_path: Path) -> None:
    expected = {}
    for seed, name in enumerate(("one", "two")):
        wrapped = trained(seed)
        expected[name] = logits(wrapped)
        adapters.save_adapter(wrapped, tmp_path / name)
    both = adapters.load_adapters(model(), {n: tmp_path / n for n in expected})
    for name in ("two", "one", "two"):
        adapters.use_adapter(both, name)
        torch.testing.assert_close(logits(both), expected[name], rtol=0, atol=1e-12)
    adapters.merge_adapter(both)
    adapters.use_adapter(both, "one")
    torch.testing.assert_close(logits(both), expected["one"], rtol=0, atol=1e-12)
    adapters.save_adapter(both, tmp_path / "again", "two")
    again, two = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("again", "two"))
    assert again.keys() == two.keys() and all(torch.equal(again[k], two[k]) for k in two)
    with pytest.raises(ValueError, match="there are: one, two"):
        adapters.use_adapter(both, "three")


def test_a_wrong_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no adapter"):
        adapters.load_adapter(model(), tmp_path)
    adapters.save_adapter(trained(1), tmp_path / "a")
    with pytest.raises(ValueError, match=r"is \[2, 32\], which does not fit lm_head"):
        adapters.load_adapter(model(hidden=48), tmp_path / "a")
    path = tmp_path / "a" / "adapter_model.safetensors"
    state = load_file(path)
    state["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.zeros(16, 32)
    save_file(state, path)
    with pytest.raises(ValueError, match="layers.9"):
        adapters.load_adapter(model(), tmp_path / "a")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="copy it again"):
        adapters.load_adapter(model(), tmp_path / "a")
    for text, said in (("{", "adapter_config.json is no JSON"), ("{}", "peft_type is None")):
        (tmp_path / "a" / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            adapters.load_adapter(model(), tmp_path / "a")


def test_the_published_size() -> None:
    """Rank 16 on the projections of Qwen3-8B: 43,646,976 parameters, 0.53 % of the language model."""
    config = Qwen3Config(
        vocab_size=151_748, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        lm = Qwen3ForCausalLM(config)
        size = sum(p.numel() for p in lm.parameters())
        wrapped = adapters.new_adapter(lm, [151_746, 151_747])
    assert adapters.lora_parameters(wrapped) == 43_646_976
    assert round(100 * 43_646_976 / size, 2) == 0.53
    trainable = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert trainable == 43_646_976 + 2 * 2 * 4096
