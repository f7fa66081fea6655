"""Time: deadlines, what is skipped to keep them, whom is served first, who is admitted."""

from dataclasses import replace

import pytest
import torch

from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import ConversationConfig, Engine, EngineConfig, Overloaded
from tests.duplex.stub import StubModel, noise


class Clock:
    """Time passes when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Writing(StubModel):
    """After audio comes `decision`, then a segment, then words without end. A forward takes a tenth of a second, and
    its hidden states are what was fed."""

    def __init__(self, clock, decision):
        super().__init__(0)
        self.clock, self.decision = clock, decision

    def forward(self, e_TD, positions_T, batch):
        self.clock.now += 0.1
        self.over_arena.forward(e_TD, positions_T, batch)
        return e_TD

    def logits(self, h_ND):
        known_ND, ids = self.qwen.model.embed_tokens.weight, self.tokenizer.ids
        logits_NV = torch.zeros(len(h_ND), len(known_ND), dtype=torch.float64)
        for h_D, logits_V in zip(h_ND, logits_NV, strict=True):
            fed = (known_ND == h_D).all(-1).nonzero().flatten().tolist()  # nothing: audio
            says = self.decision if not fed else "<|asr_start|>" if fed == [ids[self.decision]] else "cup"
            logits_V[ids[says]] = 1
        return logits_NV


def writing(decision="<|listen|>", **settings):
    clock = Clock()
    model = Writing(clock, decision)
    engine = Engine(model, rows=2, clock=clock, config=EngineConfig(**settings))
    return engine, clock, ConversationConfig(duplex=DuplexConfig(max_transcript_tokens=20), system_prompt="")


def test_the_side_channel_stops_at_its_time_and_carries_over():
    engine, clock, config = writing(side_channel_budget_s=0.55, unit_seconds=0.58)
    conversation = engine.open(config)
    for unit in range(2):
        clock.now = float(unit)
        engine.push(conversation, noise(1))
        ((_, result, stats),) = engine.run()
        # the forwards end at .1, .2 ..; the first that is past .55 hurries: its word is not taken
        assert result.side_channel_skipped and result.segment_opened and len(result.transcript_ids) == 5
        assert conversation.loop.carry_over and conversation.loop.state_dict()["carry_over"]
        assert stats.forwards == 6 and stats.unit_ms == pytest.approx(600) and stats.deadline_missed
    assert conversation.deadline_misses == 2
    engine, _, config = writing(side_channel_budget_s=None)
    engine.push(engine.open(config), noise(1))
    ((_, result, stats),) = engine.run()
    assert result.segment_closed_by == "limit" and stats.forwards == 20


def test_a_conversation_that_falls_behind_skips_what_it_hears_before_it_misses_a_deadline():
    engine, clock, config = writing(side_channel_budget_s=0.8)
    conversation = engine.open(config)
    engine.push(conversation, noise(1))
    clock.now += 0.75  # somebody else's work
    ((_, result, stats),) = engine.run()
    assert result.side_channel_skipped and not result.segment_opened and not stats.deadline_missed
    assert stats.forwards == 1 and stats.wait_ms == pytest.approx(750)
    clock.now = 1.0
    engine.push(conversation, noise(1))
    ((_, result, stats),) = engine.run()
    assert result.segment_opened and len(result.transcript_ids) == 7 and not stats.deadline_missed, "it catches up"


def test_time_is_kept_for_what_must_follow_the_side_channel():
    """A speaking unit may need as many forwards as it may say tokens: its segment closes that much earlier."""
    engine, _, config = writing("<|speak|>", side_channel_budget_s=0.95)
    config = replace(config, duplex=replace(config.duplex, max_new_speak_tokens_per_chunk=4))
    conversation = engine.open(config)
    engine.push(conversation, noise(1))
    ((_, result, stats),) = engine.run()
    assert not result.listening and result.side_channel_skipped and 0 < len(result.transcript_ids) < 6
    assert not stats.deadline_missed


def test_the_earliest_deadline_is_served_first():
    engine, clock, config = writing(side_channel_budget_s=None, step_tokens=16)
    late, early = engine.open(config, id="late"), engine.open(config, id="early")
    engine.push(early, noise(1))
    clock.now = 0.25
    engine.push(late, noise(1))
    engine.step()
    early_first = [c.id for c, *_ in engine.run()]
    assert early_first == ["early", "late"] and list(engine.conversations) == ["late", "early"]
    assert late.stats.forwards == early.stats.forwards == 20
    assert late.stats.unit_ms > 2000 > 0 and early.stats.unit_ms < late.stats.unit_ms


def test_audio_that_comes_at_once_is_owed_a_unit_a_second():
    engine, clock, config = writing(side_channel_budget_s=0.3)
    conversation = engine.open(config)
    engine.push(conversation, noise(4))
    assert [unit.deadline for unit in conversation.waiting] == [1, 2, 3, 4]
    assert not any(stats.deadline_missed for *_, stats in engine.run())
    clock.now = 9.0
    engine.push(conversation, noise(1))
    assert conversation.waiting[0].deadline == 10


def test_conversations_are_admitted_by_what_a_unit_costs():
    engine, _, config = writing(side_channel_budget_s=None, admit_load=0.9)
    config = replace(config, duplex=replace(config.duplex, max_transcript_tokens=5))
    first = engine.open(config)
    assert engine.room == 1, "nothing measured yet: rows decide"
    for _ in range(3):
        engine.push(first, noise(1))
        engine.run()
    assert engine.pace.unit_cost_s == pytest.approx(0.5) and engine.pace.load(1) == pytest.approx(0.5)
    assert engine.room == 0
    with pytest.raises(Overloaded, match="500 ms a unit"):
        engine.open(config)
    assert len(engine.conversations) == 1 and engine.arena.free_rows == 2
