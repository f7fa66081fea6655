"""An adapter that goes on from another starts where that one ended."""

from pathlib import Path

import pytest
import torch

from a2t.models.adapters import continue_adapter, new_adapter, save_adapter
from a2t.models.tiny import random_tiny


def adapter(seed: int, rank: int = 4) -> torch.nn.Module:
    model = random_tiny(0)
    torch.manual_seed(seed)
    ids = [i for t in ("<|asr_start|>", "<|asr_end|>") if (i := model.tokenizer.token_id(t)) is not None]
    return new_adapter(model.modules.llm, ids, rank, 8)


def test_values_are_taken_over_and_stay_trainable(tmp_path: Path) -> None:
    first = adapter(1)
    with torch.no_grad():
        for p in first.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    save_adapter(first, tmp_path)
    second = adapter(2)
    continue_adapter(second, tmp_path)
    trained = {n: p for n, p in first.named_parameters() if p.requires_grad}
    taken = {n: p for n, p in second.named_parameters() if p.requires_grad}
    assert trained.keys() == taken.keys() and trained
    for name, p in trained.items():
        assert torch.equal(p, taken[name]), name


def test_another_rank_is_refused(tmp_path: Path) -> None:
    save_adapter(adapter(1), tmp_path)
    with pytest.raises(ValueError, match="no adapter of this form"):
        continue_adapter(adapter(2, rank=8), tmp_path)
