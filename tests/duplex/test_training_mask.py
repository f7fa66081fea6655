"""Training sees what the engine does: one sequence, streamed with evictions and under the mask that simulates them."""

import pytest
import torch

from a2t.distill.batches import Sequences
from a2t.distill.packing import View, packed_forward
from a2t.distill.sequences import hidden_from
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import ConversationConfig, Engine, EngineConfig
from a2t.duplex.protocol import AUDIO_ID, lay_out
from a2t.kv.policies import make_policy
from tests.duplex.stub import AUDIO, StubModel, noise

UNITS = 14


@pytest.mark.parametrize(
    ("policy", "budget", "options"),
    [
        ("a2t", 90, {"retention_units": 2}),
        ("a2t", 0, {"retention_units": 1}),
        ("a2t", 45, {"retention_units": 2, "text_tier": "fold"}),
        ("streaming_llm", None, {"sink": 4, "recent": 60}),
        ("unbounded", None, {}),
    ],
)
def test_streamed_states_are_those_under_the_training_mask(policy, budget, options):
    model = StubModel(3)
    streamed, audio = {}, []

    def observe(conversation, feed, positions, h_TD):
        streamed.update(zip(positions, h_TD.clone(), strict=True))
        if feed.audio_AD is not None:
            audio.append(feed.audio_AD.clone())

    engine = Engine(model, config=EngineConfig(side_channel_budget_s=None), observer=observe)
    duplex = DuplexConfig(greedy=False, seed=4)
    conversation = engine.open(ConversationConfig(budget, policy, options, duplex))
    engine.push(conversation, noise(UNITS))
    results = [result for _, result, _ in engine.run()]
    layout = lay_out(engine.tokens, conversation.journal.prefix_ids, [r.tokens for r in results], AUDIO)
    audio_AD = torch.cat(audio)
    assert len(audio_AD) == UNITS * AUDIO and any(r.transcript_ids for r in results)
    hidden = hidden_from(layout, make_policy(policy, **options), budget)
    sequences = Sequences.of([layout], [audio_AD], [View(hidden)])
    embeddings = model.embed(sequences.ids_T)
    embeddings[torch.tensor(layout.ids) == AUDIO_ID] = audio_AD
    with torch.no_grad():
        masked_TD = packed_forward(model.qwen.model, embeddings, sequences.positions_T, sequences.packing)
    assert len(streamed) >= len(layout) - 3, "all but the end of the last unit, which waits for another"
    assert set(streamed) <= set(range(len(layout)))
    at = sorted(streamed)
    streamed_TD = torch.stack([streamed[p] for p in at])
    assert (model.logits(streamed_TD) - model.logits(masked_TD[at])).abs().max() < 1e-10
    if policy != "unbounded":
        assert min(hidden) < len(layout) - 40, "something was evicted while much was still to come"
