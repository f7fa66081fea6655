"""An adapter's scope: what is trained under mask and gate is what streams; native positions stay the base's."""

from dataclasses import replace

import pytest
import torch

from a2t.distill.batches import Sequences
from a2t.distill.config import DistillConfig, LoraSettings
from a2t.distill.packing import packed_forward
from a2t.distill.sequences import hidden_from, pair, strip_segments, view_of
from a2t.distill.step import Student
from a2t.duplex.engine import ConversationConfig, Engine, EngineConfig
from a2t.duplex.feeds import Feed
from a2t.duplex.protocol import SpecialTokens
from a2t.kv.cache import KVArena
from a2t.kv.ledger import Ledger
from a2t.kv.policies import a2t
from a2t.models.adapters import load_adapter, save_adapter
from a2t.models.scope import SIDE, Scope, ScopedModel, adapted
from a2t.models.tiny import random_tiny
from tests.distill.samples import make_example, randomize_adapter

CONFIG = DistillConfig(lora=LoraSettings(2, 4))


def tiny():
    return random_tiny(3, torch.float64)


TINY_TOKENS = SpecialTokens.from_lookup(tiny().tokenizer.token_id)


def example(seed, units):
    """An example of the samples' vocabulary, whose special tokens have the same ids as the embedded model's."""
    made = make_example(seed, units)
    return replace(made, audio_AD=torch.randn(3 * units, 64, dtype=torch.float64))


def student_of(scope, hide):
    student = Student(tiny().modules.llm, TINY_TOKENS, replace(CONFIG, scope=scope, hide_transcript=hide))
    randomize_adapter(student)
    return student


@torch.no_grad()
def trained_states(student, e, policy, budget):
    layout = pair(TINY_TOKENS, e).student
    view = view_of(layout, hidden_from(layout, policy, budget), student.scope.hide_transcript, TINY_TOKENS.asr_end)
    return layout, student.hidden(Sequences.of([layout], [e.audio_AD], [view]))


@torch.no_grad()
def streamed_states(model, layout, audio_AD, policy, budget):
    """Token by token after each unit's audio, as decoding does."""
    arena, ledger, out = KVArena(model.shape, rows=2, capacity=512), Ledger(), []
    arena.allocate()
    row = arena.allocate()
    for unit in sorted(set(layout.units)):
        at = [i for i, u in enumerate(layout.units) if u == unit]
        heard = [i for i in at if layout.audio_index[i] >= 0]
        feeds = [at] if unit < 0 else [[at[0], *heard], *([i] for i in at if i != at[0] and i not in heard)]
        for positions in feeds:
            kinds = [layout.kinds[i] for i in positions]
            e_TD = model.embed(torch.tensor([max(0, layout.ids[i]) for i in positions]))
            for n, i in enumerate(positions):
                if layout.audio_index[i] >= 0:
                    e_TD[n] = audio_AD[layout.audio_index[i]]
            batch = arena.pack([row], [len(positions)])
            batch.feeds = [Feed([layout.ids[i] for i in positions], kinds, unit)]
            ledger.append(kinds, unit)
            out.append(model.forward(e_TD, torch.tensor(positions), batch))
        if unit >= 0:
            eviction = policy.plan_eviction(ledger, budget)
            ledger.drop(eviction.drop)
            arena.drop(row, eviction.drop)
    return torch.cat(out)


@pytest.mark.parametrize(("scope", "hide"), [("segment", False), ("everywhere", True), ("segment", True)])
@pytest.mark.parametrize(("retention", "budget"), [(2, 0), (3, 90)])
def test_what_is_trained_is_what_streams(tmp_path, scope, hide, retention, budget):
    student, e, policy = student_of(scope, hide), example(5, 12), a2t(retention)
    save_adapter(student.peft, tmp_path)
    student.scope.write(tmp_path)
    assert Scope.read(tmp_path) == Scope(scope, hide)
    layout, trained = trained_states(student, e, policy, budget)
    model = tiny()
    scoped = adapted(model, model.modules.llm, tmp_path)
    assert isinstance(scoped, ScopedModel)
    streamed = streamed_states(scoped, layout, e.audio_AD, policy, budget)
    torch.testing.assert_close(streamed, trained, rtol=0, atol=1e-10)
    _, plain = trained_states(student_of("everywhere", False), e, policy, budget)
    assert (plain - trained).abs().max() > 1e-3, "the scope changes something here"


@torch.no_grad()
def test_native_positions_are_the_bases():
    e = example(4, 6)
    bare = tiny().modules.llm
    _, silent = trained_states(student_of("segment", False), strip_segments(e), a2t(), None)
    layout = pair(TINY_TOKENS, strip_segments(e)).student
    sequences = Sequences.of([layout], [e.audio_AD])
    e_TD = bare.model.embed_tokens(sequences.ids_T).index_copy(0, sequences.audio_at_A, e.audio_AD)
    base = packed_forward(bare.model, e_TD, sequences.positions_T, sequences.packing)
    torch.testing.assert_close(silent, base, rtol=0, atol=1e-12)
    # With segments in between, hidden from them, native positions are the base's but for their place in the stream.
    with_segments, states = trained_states(student_of("segment", True), e, a2t(), None)
    native = [i for i, kind in enumerate(with_segments.kinds) if kind not in SIDE]
    assert len(native) == len(layout) < len(with_segments)
    moved = packed_forward(bare.model, e_TD, torch.tensor(native), sequences.packing)
    torch.testing.assert_close(states[native], moved, rtol=0, atol=1e-12)


def test_the_engine_tells_a_scoped_model_what_it_feeds(tmp_path):
    student = student_of("segment", True)
    save_adapter(student.peft, tmp_path)
    student.scope.write(tmp_path)
    model = tiny()
    engine = Engine(
        adapted(model, model.modules.llm, tmp_path), 2, 2048, config=EngineConfig(side_channel_budget_s=None)
    )
    calls = [engine.open(ConversationConfig(budget=0), id=str(n)) for n in range(2)]
    rng = torch.Generator().manual_seed(0)
    for call in calls:
        engine.push(call, (0.1 * torch.randn(16_000 * 8, generator=rng)).numpy())
    assert len(engine.run()) == 16
    with pytest.raises(ValueError, match=r"acts on some positions only.*a2t\.models\.scope"):
        load_adapter(tiny().modules.llm, tmp_path, merge=True)
    (tmp_path / "scope.json").write_text('{"where": "nowhere"}')
    with pytest.raises(ValueError, match="does not say a scope"):
        Scope.read(tmp_path)
