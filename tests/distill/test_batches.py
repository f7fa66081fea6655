"""Steps cover an epoch once, forwards keep to their size, workers keep in step."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from a2t.distill.batches import plan_epoch, split_step
from a2t.distill.config import PRESETS, DistillConfig, with_overrides
from a2t.distill.corpus import CachedCorpus
from tests.distill.samples import make_example

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=120)


@given(units=lengths, size=st.integers(1, 20), epoch=st.integers(0, 3))
def test_an_epoch_has_every_sequence_once_in_steps_of_the_global_batch(units, size, epoch):
    config = DistillConfig(global_batch=size)
    steps = plan_epoch(units, config, epoch)
    assert sorted(i for s in steps for i in s) == list(range(len(units)))
    assert sorted(map(len, steps), reverse=True)[:-1] == [size] * (len(steps) - 1)
    assert steps == plan_epoch(units, config, epoch)


@given(units=lengths, held=st.integers(1, 100))
def test_steps_by_units_stop_when_they_hold_enough(units, held):
    steps = plan_epoch(units, DistillConfig(step_units=held), 0)
    assert sorted(i for s in steps for i in s) == list(range(len(units)))
    assert all(sum(units[i] for i in s) - max(units[i] for i in s) < held for s in steps)


@given(units=lengths, workers=st.integers(1, 5), micro=st.integers(1, 100))
def test_workers_share_a_step(units, workers, micro):
    split = split_step(range(len(units)), units.__getitem__, workers, micro)
    assert sorted(i for w in split for f in w for i in f) == list(range(len(units)))
    assert len({len(w) for w in split}) == 1, "collective operations need as many forwards on each worker"
    assert all(len(f) <= 1 or sum(units[i] for i in f) <= micro for w in split for f in w)
    loads = [sum(units[i] for f in w for i in f) for w in split]
    assert max(loads) - min(loads) <= max(units)


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_less_than_a_tenth_is_padding(workers):
    """Nothing is padded inside a forward; what is left is workers that wait for the one with most to do. Utterances
    are as long as LibriSpeech's."""
    rng = random.Random(0)
    units = [max(2, round(min(24.0, rng.gauss(12.5, 3.6)))) for _ in range(4000)]

    def waiting(steps):
        done = waited = 0
        for step in steps:
            loads = [sum(units[i] for f in w for i in f) for w in split_step(step, units.__getitem__, workers, 64)]
            done, waited = done + sum(loads), waited + max(loads) * workers
        return 1 - done / waited

    assert waiting(plan_epoch(units, DistillConfig(), 0)) < 0.1


def test_a_cached_corpus_reads_back(tmp_path):
    examples = [make_example(n, 1 + n) for n in range(5)]
    assert CachedCorpus.write(tmp_path, iter(examples), torch.float64, made_by="a test") == 5
    read = CachedCorpus(tmp_path)
    assert (read.ids, read.units) == ([e.id for e in examples], [1, 2, 3, 4, 5])
    for n in (4, 0, 2):
        assert torch.equal(read[n].audio_AD, examples[n].audio_AD)
        assert (read[n].prefix, read[n].units) == (examples[n].prefix, examples[n].units)
    (tmp_path / "audio-00000.safetensors").unlink()
    with pytest.raises(ValueError, match="audio-00000.safetensors is missing"):
        CachedCorpus(tmp_path)[0]
    with pytest.raises(ValueError, match="no corpus.json"):
        CachedCorpus(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="no example to write"):
        CachedCorpus.write(tmp_path / "none", [])


def test_settings_are_checked():
    config = with_overrides(
        PRESETS["embedded"], {"epochs": 2, "learning_rate": "1e-4", "lora": {"rank": 8}, "betas": [0.9, 0.95]}
    )
    assert (config.epochs, config.learning_rate, config.lora.rank, config.betas) == (2, 1e-4, 8, (0.9, 0.95))
    assert config.eviction == PRESETS["embedded"].eviction
    for changes, message in [
        ({"epoch": 2}, "no setting 'epoch'; it has"),
        ({"epochs": 0}, "epochs = 0 is out of range"),
        ({"epochs": "two"}, "int is needed"),
        ({"lora": 8}, "group of settings"),
        ({"lora": {"ranks": 8}}, "LoraSettings has no setting 'ranks'"),
    ]:
        with pytest.raises(ValueError, match=message):
            with_overrides(config, changes)
