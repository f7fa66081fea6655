from random import Random

import numpy as np
import pytest
import torch

from a2t.data import world
from a2t.data.conversation import Plan, converse, imagined_speech
from a2t.data.manifest import Row
from a2t.models.tiny import TinyConfig, TinyModules, WordTokenizer
from a2t.pretrain.guidance import Guidance, Watch
from a2t.pretrain.language import LanguageTrainer, Student
from a2t.pretrain.sample import MAX_POSITION, Sample
from a2t.pretrain.samples import CLASSES, Sampler

SMALL = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "feed_forward": 32}


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(WordTokenizer.of_words(world.WORDS))


def session_row(seed: int) -> Row:
    rng = Random(seed)
    return converse(rng, imagined_speech(rng), Plan(60, 5, 2, mixed=True, prompt_facts=0.5), False).row(
        "s", "-", "-", "train"
    )


def text(sampler: Sampler, ids: np.ndarray) -> list[str]:
    return [sampler.tokenizer.tokenizer.id_to_token(int(i)) for i in ids]


@pytest.mark.parametrize("seed", range(6))
def test_a_session_predicts_exactly_its_native_tokens(sampler: Sampler, seed: int) -> None:
    row = session_row(seed)
    sample = sampler.session(Random(seed), row)
    predicted = [int(t) for t in sample.targets_T[sample.targets_T >= 0]]
    assert row.native is not None
    assert text(sampler, np.array(predicted)) == [t for unit in row.native for t in unit]
    at = np.nonzero(sample.targets_T >= 0)[0]
    assert (sample.ids_T[at + 1] == sample.targets_T[at]).all()
    assert (np.diff(sample.positions_T) >= 1).all() and sample.positions_T[-1] <= MAX_POSITION


@pytest.mark.parametrize("seed", range(20))
def test_guidance_points_at_the_value(sampler: Sampler, seed: int) -> None:
    """In text, where every source is a token: the token at each source is the value about to be answered."""
    sample = sampler.compact(Random(seed), 1.0)
    for at, sources in sample.guide:
        assert {int(sample.ids_T[s]) for s in sources} == {int(sample.targets_T[at])}
        assert all(s < at for s in sources)
    values = {CLASSES.index(c) for c in ("thing", "colour", "person", "event")}
    assert len(sample.guide) == sum(int(c) in values for c in sample.classes_T)


def test_dropping_silence_keeps_what_matters(sampler: Sampler) -> None:
    row = session_row(1)
    whole = sampler.session(Random(1), row, offset=False)
    blank = np.ones(row.units() * 10, bool)
    blank[::7] = False
    sparse = sampler.session(Random(1), row, drop=1.0, blank=blank, offset=False)
    assert len(sparse) < 0.5 * len(whole)
    kept = set(sparse.positions_T.tolist())
    assert all(int(p) in kept for p in whole.positions_T[whole.targets_T >= 0])
    assert (sparse.targets_T[sparse.targets_T >= 0] == whole.targets_T[whole.targets_T >= 0]).all()
    assert set(range(0, row.units() * 10, 7)) <= set(sparse.audio_T.tolist())


def test_batching_and_padding_change_no_prediction(sampler: Sampler) -> None:
    torch.manual_seed(0)
    modules = TinyModules(TinyConfig(vocab=sampler.tokenizer.size, **SMALL)).double()
    trainer = LanguageTrainer(modules, Student(modules).double(), sampler)
    samples = [sampler.compact(Random(s), p) for s, p in ((0, 1.0), (1, 0.0), (2, 0.5))]
    with torch.no_grad():
        together = trainer.predict(samples, None)[0]
        alone = torch.cat([trainer.predict([s], None)[0] for s in samples])
    assert torch.allclose(together, alone, atol=1e-10)


def test_guided_attention_is_the_layers_own(sampler: Sampler) -> None:
    """The attention that guidance rewards equals what the layer computes, from transformers' eager attention."""
    torch.manual_seed(0)
    modules = TinyModules(TinyConfig(vocab=sampler.tokenizer.size, **SMALL)).double()
    modules.llm.set_attn_implementation("eager")
    watch, head = Watch(modules.llm), Guidance(32).double()
    sample: Sample = sampler.compact(Random(3), 1.0)
    with torch.no_grad():
        out = modules.llm.model(
            input_ids=torch.from_numpy(sample.ids_T)[None],
            position_ids=torch.from_numpy(sample.positions_T)[None],
            output_attentions=True,
        )
        sample.bind = []
        loss, _ = watch.losses(head, [sample])
    p_HTT = out.attentions[3][0]
    want = [-p_HTT[h, at, sources].sum().log() for at, sources in sample.guide for h in range(2)]
    assert float(loss) == pytest.approx(
        float(torch.stack(want).mean()), abs=1e-6
    )  # eager attention takes its softmax in float32
