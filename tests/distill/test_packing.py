"""Packed sequences give what each gives alone, and simulated evictions give what streaming with eviction gives."""

import pytest
import torch

from a2t.distill import packing
from a2t.distill.batches import Sequences
from a2t.distill.packing import View, packed_forward
from a2t.distill.sequences import hidden_from, pair
from a2t.distill.teacher import frozen_hidden
from a2t.duplex.protocol import AUDIO_ID
from a2t.kv.cache import KVArena
from a2t.kv.ledger import Ledger
from a2t.kv.policies import a2t, make_policy
from a2t.models.language import Qwen3OverArena
from tests.distill.samples import TOKENS, make_example, make_language


@torch.no_grad()
def test_packed_sequences_equal_stock_forwards_one_by_one():
    language = make_language()
    examples = [make_example(n, units) for n, units in enumerate((3, 1, 7))]
    layouts = [pair(TOKENS, e).student for e in examples]
    sequences = Sequences.of(layouts, [e.audio_AD for e in examples])
    stock = []
    for e, layout in zip(examples, layouts, strict=True):  # before anything of ours touches the model
        ids = torch.tensor(layout.ids)
        embeddings = language.model.embed_tokens(ids.clamp(min=0))
        embeddings[ids == AUDIO_ID] = e.audio_AD
        stock.append(language.model(inputs_embeds=embeddings[None], use_cache=False).last_hidden_state[0])
    packed = frozen_hidden(language.model, language.model.embed_tokens.weight, sequences)
    torch.testing.assert_close(packed, torch.cat(stock), rtol=0, atol=1e-12)


@torch.no_grad()
def stream(language, layout, audio_AD, policy, budget):
    """Unit by unit through the arena, the ledger and the policy, as the engine does; hidden states [T, D]."""
    over = Qwen3OverArena(language)
    arena, ledger = KVArena(over.shape, rows=1, capacity=512), Ledger()
    row, out = arena.allocate(), []
    units = sorted(set(layout.units))
    for unit in units:
        at = [i for i, u in enumerate(layout.units) if u == unit]
        ids = torch.tensor([layout.ids[i] for i in at])
        embeddings = over.embed(ids.clamp(min=0))
        for n, i in enumerate(at):
            if layout.audio_index[i] >= 0:
                embeddings[n] = audio_AD[layout.audio_index[i]]
        positions = ledger.append([layout.kinds[i] for i in at], unit)
        out.append(over.forward(embeddings, torch.tensor(list(positions)), arena.pack([row], [len(at)])))
        if unit >= 0:
            eviction = policy.plan_eviction(ledger, budget)
            ledger.drop(eviction.drop)
            arena.drop(row, eviction.drop)
    return torch.cat(out), ledger


@pytest.mark.parametrize(
    ("policy", "budget"),
    [(a2t(2), 0), (a2t(3), 70), (a2t(2, "fold"), 40), (make_policy("streaming_llm", sink=2, recent=30), None)],
    ids=["floor", "budget", "fold", "streaming_llm"],
)
def test_the_simulated_mask_is_streaming_with_eviction(monkeypatch, policy, budget):
    monkeypatch.setattr(packing, "BLOCK", 16)  # several blocks in a short sequence
    language = make_language()
    examples = [make_example(5, 14), make_example(6, 4), make_example(7, 11)]
    layouts = [pair(TOKENS, e).student for e in examples]
    hidden = [View(hidden_from(x, policy, budget)) for x in layouts]
    sequences = Sequences.of(layouts, [e.audio_AD for e in examples], hidden)
    masked = frozen_hidden(language.model, language.model.embed_tokens.weight, sequences)
    streamed = [stream(language, x, e.audio_AD, policy, budget) for x, e in zip(layouts, examples, strict=True)]
    assert streamed[0][1].residents < len(layouts[0]), "nothing was evicted: the test shows nothing"
    torch.testing.assert_close(masked, torch.cat([h for h, _ in streamed]), rtol=0, atol=1e-11)
    unmasked = Sequences.of(layouts, [e.audio_AD for e in examples])
    assert (frozen_hidden(language.model, language.model.embed_tokens.weight, unmasked) - masked).abs().max() > 1e-3


def test_gradients_through_blocks_equal_those_of_a_dense_mask(monkeypatch):
    monkeypatch.setattr(packing, "BLOCK", 16)
    language = make_language()
    example = make_example(5, 12)
    layout = pair(TOKENS, example).student
    gone = hidden_from(layout, a2t(2), 0)
    weights = torch.randn(len(layout), 32, dtype=torch.float64)
    grads = []
    for dense in (False, True):
        audio = example.audio_AD.clone().requires_grad_()
        sequences = Sequences.of([layout], [audio], [View(gone)])
        embeddings = language.model.embed_tokens(sequences.ids_T).index_copy(0, sequences.audio_at_A, audio)
        if dense:
            q, k = torch.arange(len(layout))[:, None], torch.arange(len(layout))
            mask = (k <= q) & (q < torch.tensor(gone))
            out = language.model(inputs_embeds=embeddings[None], attention_mask={"full_attention": mask[None, None]})
            h = out.last_hidden_state[0]
        else:
            h = packed_forward(language.model, embeddings, sequences.positions_T, sequences.packing)
        (h * weights).sum().backward()
        grads.append(audio.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)
