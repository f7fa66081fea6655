"""The engine: exactness in float64, many conversations, memory, bad input."""

import numpy as np
import pytest
import torch

from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import CacheFull, ConversationConfig, Engine, EngineConfig
from a2t.duplex.protocol import AUDIO_ID
from a2t.kv.cache import ArenaFull
from tests.duplex.stub import UNIT, StubModel, noise

UNTIMED = EngineConfig(side_channel_budget_s=None)


class Recording:
    """What every conversation was fed, its hidden states, and what each fed position sees: the residents at that time,
    where tokens held over from the last unit still see what was evicted after it."""

    def __init__(self):
        self.fed = {}
        self.resident = {}

    def __call__(self, conversation, feed, positions, h_TD):
        before = self.resident.get(conversation.id, set())
        now = set(conversation.ledger.positions)
        sees = []
        for n, position in enumerate(positions):
            held_over = feed.units is not None and feed.units[n] != feed.unit
            sees.append({p for p in (before | set(positions[:n]) if held_over else now) if p < position} | {position})
        self.resident[conversation.id] = now
        self.fed.setdefault(conversation.id, []).append((feed, list(positions), sees, h_TD.clone()))

    def hidden(self, id):
        return torch.cat([h_TD for *_, h_TD in self.fed[id]])


def full_forward(model, fed):
    """One plain forward of the stock model, nothing cached: a key is hidden from the queries that come before it and
    from those that come after its eviction."""
    ids_T = torch.tensor([i for feed, *_ in fed for i in feed.ids])
    positions = [p for _, fed_at, *_ in fed for p in fed_at]
    e_TD = model.embed(ids_T.clamp(min=0))
    e_TD[ids_T == AUDIO_ID] = torch.cat([feed.audio_AD for feed, *_ in fed if feed.audio_AD is not None])
    seen_TT = torch.zeros((len(ids_T), len(ids_T)), dtype=torch.bool)
    for row, sees in enumerate(sees for _, _, one, _ in fed for sees in one):
        seen_TT[row] = torch.tensor([p in sees for p in positions])
    mask_11TT = torch.where(seen_TT, 0.0, -torch.inf).to(e_TD.dtype)[None, None]
    with torch.no_grad():
        out = model.qwen.model(
            inputs_embeds=e_TD[None],
            position_ids=torch.tensor([positions]),
            attention_mask={"full_attention": mask_11TT},
        )
    return out.last_hidden_state[0], seen_TT


@pytest.mark.parametrize(
    ("policy", "budget", "options"),
    [
        ("a2t", 90, {"retention_units": 2}),
        ("a2t", 0, {"retention_units": 1}),
        ("streaming_llm", None, {"sink": 4, "recent": 60}),
    ],
)
def test_streaming_with_eviction_equals_the_full_forward_with_the_row_dependent_mask(policy, budget, options):
    model, recording = StubModel(3), Recording()
    engine = Engine(model, config=UNTIMED, observer=recording)
    config = ConversationConfig(budget, policy, options, DuplexConfig(greedy=False, seed=4))
    conversation = engine.open(config, id="a")
    engine.push(conversation, noise(16))
    done = engine.run()
    assert sum(stats.evicted for *_, stats in done) > 80
    assert any(result.segment_opened for _, result, _ in done)
    expected_TD, seen_TT = full_forward(model, recording.fed["a"])
    causal = torch.ones_like(seen_TT).tril()
    assert (causal & ~seen_TT).sum() > 3000, "the mask hides evicted keys"
    assert (recording.hidden("a") - expected_TD).abs().max() < 1e-10
    assert not torch.allclose(full_causal(model, recording.fed["a"]), expected_TD), "eviction changes what is computed"


def full_causal(model, fed):
    unhidden = [(feed, fed_at, [set(range(p + 1)) for p in fed_at], h) for feed, fed_at, _, h in fed]
    return full_forward(model, unhidden)[0]


SETTINGS = {
    "a2t": ConversationConfig(60, "a2t", {"retention_units": 1}),
    "floor": ConversationConfig(0, "a2t", {"retention_units": 2, "text_tier": "fold"}, DuplexConfig(greedy=False)),
    "unbounded": ConversationConfig(None, "unbounded", system_prompt="moon"),
    "window": ConversationConfig(None, "streaming_llm", {"recent": 40}, DuplexConfig(side_channel=False)),
    "no prompt": ConversationConfig(70, duplex=DuplexConfig(greedy=False, seed=9), system_prompt=""),
}


def test_batched_equals_one_by_one():
    model, alone, together = StubModel(1), Recording(), Recording()
    expected = {}
    for n, (name, config) in enumerate(SETTINGS.items()):
        engine = Engine(model, config=UNTIMED, observer=alone)
        engine.push(engine.open(config, id=name), noise(5, n))
        expected[name] = [result for _, result, _ in engine.run()]
    engine = Engine(model, rows=len(SETTINGS), config=UNTIMED, observer=together)
    got = {name: [] for name in SETTINGS}

    def collect(finished):
        for conversation, result, _ in finished:
            got[conversation.id].append(result)

    for n, (name, config) in enumerate(SETTINGS.items()):  # they come one after another, in the middle of others' units
        engine.push(engine.open(config, id=name), noise(5, n))
        for _ in range(3):
            collect(engine.step())
    collect(engine.run())
    for name in SETTINGS:
        assert (together.hidden(name) - alone.hidden(name)).abs().max() < 1e-10
        assert [r.tokens for r in got[name]] == [r.tokens for r in expected[name]]
        assert len(got[name]) == 5


def test_audio_may_come_in_pieces_of_any_length():
    model, pcm_S = StubModel(1), noise(4.5)
    results = []
    for cuts in ([], [100, 16000, 16001, 40000, 71000]):
        engine = Engine(model, config=UNTIMED)
        conversation = engine.open()
        done = []
        for piece in np.split(pcm_S, cuts):
            engine.push(conversation, piece)
            done += engine.run()
        results.append([result.tokens for _, result, _ in done])
    assert len(results[0]) == 4 and results[0] == results[1]


def test_forced_listening_holds_for_the_unit_that_is_being_filled():
    engine = Engine(StubModel(2, bias={"<|speak|>": 50.0}), config=UNTIMED)
    conversation = engine.open(ConversationConfig(duplex=DuplexConfig(max_new_speak_tokens_per_chunk=2)))
    for samples, force in [(0.5, True), (0.5, False), (1, False), (1.2, True), (0.8, False), (1, False)]:
        engine.push(conversation, noise(samples), force_listen=force)
    listened = [result.listening for _, result, _ in engine.run()]
    assert listened == [True, False, True, False, False]


def test_an_arena_is_sized_by_the_memory_given_and_stays_where_it_is():
    model = StubModel(1)
    row = 300 * model.shape.bytes_per_position
    with pytest.raises(ValueError, match="give more memory"):
        Engine(model, capacity=300, memory=row - 1, config=UNTIMED)
    engine = Engine(model, capacity=300, memory=4 * row + row // 2, config=UNTIMED)
    assert engine.rows == 3 and engine.arena.kv_N2RHCD.nbytes <= 4 * row
    where = engine.arena.kv_N2RHCD.data_ptr()
    for round in range(3):
        opened = [engine.open(ConversationConfig(80, policy_options={"retention_units": 1})) for _ in range(3)]
        for n, conversation in enumerate(opened):
            engine.push(conversation, noise(3 + round, n))
        engine.run()
        for conversation in opened:
            engine.close(conversation)
    assert engine.arena.kv_N2RHCD.data_ptr() == where and engine.arena.free_rows == 4


def test_stats_agree_with_ledger_and_arena():
    engine = Engine(StubModel(1), config=UNTIMED)
    conversation = engine.open(ConversationConfig(budget=50, policy_options={"retention_units": 1}))
    engine.push(conversation, noise(6))
    for _, _, stats in engine.run():
        assert stats.total_residents * engine.arena.bytes_per_position == stats.kv_bytes
        assert stats.peak >= stats.total_residents
        assert stats.unit_ms > 0 and stats.wait_ms >= 0
    assert stats.residents == conversation.ledger.counts() and conversation.units == 6
    assert stats.encoder_bytes == conversation.encoder_state.nbytes
    engine.settle(conversation)
    assert engine.arena.lengths[conversation.row] == conversation.ledger.residents


@pytest.mark.parametrize(
    ("pcm", "remedy"),
    [
        (np.zeros(0, np.float32), "empty"),
        (np.zeros((2, 100), np.float32), "one channel"),
        (np.zeros(100, np.int16), "32768"),
        (np.zeros(100), "astype"),
        (np.array([0, np.nan], np.float32), "sample 1 is nan"),
        (np.array([np.inf, 0], np.float32), "sample 0 is inf"),
        (np.array([12000, 0], np.float32), "32768"),
        ([0.0, 0.1], "numpy array"),
    ],
)
def test_audio_that_is_none_is_refused_and_nothing_is_heard(pcm, remedy):
    engine = Engine(StubModel(0), config=UNTIMED)
    conversation = engine.open()
    with pytest.raises(ValueError, match=remedy):
        engine.push(conversation, pcm)
    assert len(conversation.encoder_state.pcm_S) == 0 and len(conversation.journal.audio_S) == 0


def test_rows_are_admitted_and_given_back():
    engine = Engine(StubModel(0), rows=2, config=UNTIMED)
    first, _ = engine.open(id="first"), engine.open()
    with pytest.raises(ArenaFull, match="all 2 rows"):
        engine.open()
    engine.push(first, noise(1))
    engine.step()
    engine.step()  # in the middle of a unit
    engine.close(first)
    with pytest.raises(ValueError, match="first is not open"):
        engine.push(first, noise(1))
    third = engine.open(id="first")
    engine.push(third, noise(1))
    assert [c for c, *_ in engine.run()] == [third]
    with pytest.raises(ValueError, match="already open"):
        engine.open(id="first")


def test_a_full_row_ends_its_conversation_alone():
    engine = Engine(StubModel(1), rows=2, capacity=150, config=UNTIMED)
    full = engine.open(ConversationConfig(None, "unbounded"), id="full")
    fits = engine.open(ConversationConfig(0, policy_options={"retention_units": 0, "text_tier": "fold"}), id="fits")
    for conversation in (full, fits):
        engine.push(conversation, noise(7))
    with pytest.raises(CacheFull, match="full.*larger capacity") as error:
        engine.run()
    assert error.value.conversation is full
    done = engine.run()
    assert sum(c is fits for c, *_ in done) == 7 and 0 < sum(c is full for c, *_ in done) == full.units < 7
    with pytest.raises(CacheFull):
        engine.push(full, noise(1))
    engine.close(full)
    with pytest.raises(ValueError, match="system prompt has 60 tokens"):
        engine.open(ConversationConfig(system_prompt="cup " * 60))
    assert len(engine.conversations) == 1 and UNIT == 16000
