"""Exactness over the arena, in float64, against stock transformers that knows nothing of it."""

import json
from dataclasses import dataclass, field

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load, save
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from a2t.kv.cache import KVArena
from a2t.kv.kinds import Kind
from a2t.kv.ledger import Ledger
from a2t.kv.policies import Policy, a2t, streaming_llm, unbounded
from a2t.models.language import Qwen3OverArena
from tests.kv.unit_sequences import decode_step

EXACT = 1e-10
VOCAB, HIDDEN = 50, 48


def random_qwen3(seed: int = 1, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> Qwen3ForCausalLM:
    """A random model whose attention is sharp, so that a key that should not be there shows."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.25 * noise if parameter.dim() == 2 else 1 + 0.3 * noise)
    return model.to(dtype)


@dataclass
class Script:
    """What a conversation feeds: embeddings, and the kinds of each unit (the first entry is the prefix)."""

    e_TD: Tensor
    kinds: list[list[Kind]]


def script(seed: int, units: int, dtype: torch.dtype = torch.float64) -> Script:
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(0, 128, (units,), generator=generator)
    kinds = [[Kind.PREFIX] * 6, *(decode_step(int(byte)).kinds for byte in choices)]
    total = sum(map(len, kinds))
    return Script(torch.randn(total, HIDDEN, generator=generator, dtype=dtype), kinds)


@dataclass
class Conversation:
    """A row driven as the engine would: marker and audio in one feed, single steps, the last two tokens together."""

    arena: KVArena
    policy: Policy
    budget: int | None
    ledger: Ledger = field(default_factory=Ledger)
    evicted_before: dict[int, int] = field(default_factory=dict)  # position -> the first position fed after it left
    logits: list[Tensor] = field(default_factory=list)
    row: int = -1

    def __post_init__(self) -> None:
        if self.row < 0:
            self.row = self.arena.allocate()

    @staticmethod
    def feeds(kinds: list[Kind]) -> list[list[Kind]]:
        if kinds[0] is Kind.PREFIX:
            return [kinds]
        return [kinds[:4], *([kind] for kind in kinds[4:-2]), kinds[-2:]]

    def evict(self) -> None:
        eviction = self.policy.plan_eviction(self.ledger, self.budget)
        for slot in eviction.drop:
            self.evicted_before[self.ledger.positions[slot]] = self.ledger.next_position
        self.ledger.drop(eviction.drop)
        self.arena.drop(self.row, eviction.drop)


def step(model: Qwen3OverArena, feeds: list[tuple[Conversation, list[Kind], int, Tensor]]) -> None:
    """One forward for several conversations: (who, kinds fed, their unit, that conversation's embeddings)."""
    positions = [who.ledger.append(kinds, unit) for who, kinds, unit, _ in feeds]
    e_TD = torch.cat([e[p.start : p.stop] for p, (_, _, _, e) in zip(positions, feeds, strict=True)])
    batch = feeds[0][0].arena.pack([who.row for who, *_ in feeds], [len(p) for p in positions])
    h_TD = model.forward(e_TD, torch.tensor([n for p in positions for n in p]), batch)
    for (who, *_), part in zip(feeds, model.logits(h_TD).split([len(p) for p in positions]), strict=True):
        who.logits.append(part)


def stream(model: Qwen3OverArena, who: Conversation, text: Script, first_unit: int = -1) -> Tensor:
    """Feeds the script from `first_unit` on; logits [T, V] of everything fed."""
    for unit, kinds in enumerate(text.kinds[first_unit + 1 :], start=first_unit):
        for fed in who.feeds(kinds):
            step(model, [(who, fed, unit, text.e_TD)])
        who.evict()
    return torch.cat(who.logits)


@torch.no_grad()
def full_forward(e_TD: Tensor, evicted_before: dict[int, int], model: Qwen3ForCausalLM) -> Tensor:
    """One stock forward; a key is hidden only from queries that come after its eviction."""
    T = len(e_TD)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    for position, before in evicted_before.items():
        hidden[before:, position] = True
    mask = torch.zeros(T, T, dtype=e_TD.dtype).masked_fill(hidden, float("-inf"))
    positions = torch.arange(T)[None]
    return model(inputs_embeds=e_TD[None], attention_mask=mask[None, None], position_ids=positions).logits[0]


@pytest.fixture(scope="module")
def model() -> Qwen3OverArena:
    return Qwen3OverArena(random_qwen3())


POLICIES = [
    pytest.param(a2t(2), 40, id="a2t"),
    pytest.param(a2t(5), 0, id="floor"),
    pytest.param(a2t(1, "fold"), 25, id="fold"),
    pytest.param(unbounded(), 10, id="unbounded"),
    pytest.param(streaming_llm(4, 30), None, id="streaming_llm"),
]


@pytest.mark.parametrize(("policy", "budget"), POLICIES)
def test_streaming_with_eviction_is_the_full_forward_with_the_row_dependent_mask(model, policy, budget):
    text = script(3, units=14)
    who = Conversation(KVArena(model.shape, 1, 400), policy, budget)
    streamed = stream(model, who, text)
    expected = full_forward(text.e_TD, who.evicted_before, random_qwen3())
    assert bool(who.evicted_before) == (policy.name != "unbounded")
    assert (streamed - expected).abs().max() < EXACT
    if who.evicted_before:  # hiding evicted keys from every query, or from none, is another computation
        for wrong in (dict.fromkeys(who.evicted_before, 0), {}):
            wrong = {position: max(before, position + 1) for position, before in wrong.items()}
            assert (full_forward(text.e_TD, wrong, random_qwen3()) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("policy", "budget"), POLICIES)
def test_the_arena_moves_give_the_logits_of_an_index_select_cache(model, policy, budget):
    text, reference, cache = script(4, units=10), random_qwen3(), DynamicCache()
    who = Conversation(KVArena(model.shape, 1, 400), policy, budget)
    held: list[int] = []
    for unit, kinds in enumerate(text.kinds, start=-1):
        for fed in who.feeds(kinds):
            step(model, [(who, fed, unit, text.e_TD)])
            new = list(range(who.ledger.next_position - len(fed), who.ledger.next_position))
            mask = torch.zeros(len(new), len(held) + len(new), dtype=torch.float64)
            mask[:, len(held) :] = torch.full((len(new), len(new)), float("-inf"), dtype=torch.float64).triu(1)
            with torch.no_grad():
                out = reference(
                    inputs_embeds=text.e_TD[None, new],
                    position_ids=torch.tensor([new]),
                    attention_mask=mask[None, None],
                    cache=cache,
                )
            held += new
            assert (who.logits[-1] - out.logits[0]).abs().max() < EXACT
        who.evict()
        keep = [n for n, position in enumerate(held) if position not in who.evicted_before]
        held = [held[n] for n in keep]
        for layer in cache.layers:
            layer.keys = layer.keys.index_select(2, torch.tensor(keep))
            layer.values = layer.values.index_select(2, torch.tensor(keep))
        assert sorted(who.ledger.positions) == held


def test_batched_is_one_by_one(model):
    texts = [script(seed, units) for seed, units in ((5, 9), (6, 4), (7, 12), (8, 1))]
    settings = [(a2t(2), 30), (a2t(1, "fold"), 20), (streaming_llm(3, 25), None), (unbounded(), None)]
    alone = [
        stream(model, Conversation(KVArena(model.shape, 1, 400), *how), text)
        for how, text in zip(settings, texts, strict=True)
    ]
    arena = KVArena(model.shape, 4, 400)
    people = [Conversation(arena, *how) for how in settings]
    todo = [
        [
            (unit, fed, n == len(who.feeds(kinds)) - 1)
            for unit, kinds in enumerate(text.kinds, start=-1)
            for n, fed in enumerate(who.feeds(kinds))
        ]
        for who, text in zip(people, texts, strict=True)
    ]
    while any(todo):
        now = [(who, feeds.pop(0), text) for who, feeds, text in zip(people, todo, texts, strict=True) if feeds]
        step(model, [(who, fed, unit, text.e_TD) for who, (unit, fed, _), text in now])
        for who, (_, _, last), _ in now:
            if last:
                who.evict()
    for who, expected in zip(people, alone, strict=True):
        assert (torch.cat(who.logits) - expected).abs().max() < EXACT


def test_a_saved_row_goes_on_bit_for_bit(model):
    text = script(9, units=12)
    who = Conversation(KVArena(model.shape, 1, 300), a2t(2), 30)
    stream(model, who, Script(text.e_TD, text.kinds[:8]))
    assert who.evicted_before
    tensors, books = save(who.arena.export(who.row)), json.dumps(who.ledger.to_json())

    other = KVArena(model.shape, 3, 500)
    other.allocate()
    again = Conversation(other, who.policy, who.budget, ledger=Ledger.from_json(json.loads(books)))
    other.load(again.row, load(tensors))
    who.logits.clear()
    assert torch.equal(stream(model, who, text, first_unit=7), stream(model, again, text, first_unit=7))
    assert again.ledger.to_json() == who.ledger.to_json()


def test_a_long_feed_is_blocked_without_a_difference(model):
    text = script(10, units=3)
    who = Conversation(KVArena(model.shape, 1, 800), a2t(0), 0)
    stream(model, who, text)
    fed = torch.cat([text.e_TD, torch.randn(600, HIDDEN, dtype=torch.float64)])
    step(model, [(who, [Kind.RESPONSE] * 600, 3, fed)])
    expected = full_forward(fed, who.evicted_before, random_qwen3())
    assert (torch.cat(who.logits) - expected).abs().max() < EXACT


def test_turned_keys_are_keys_fed_later(model):
    text, later = script(11, units=1), 37
    arena = KVArena(model.shape, 2, 100)
    rows, T = [arena.allocate(), arena.allocate()], len(text.e_TD)
    for row, first in zip(rows, (5, 5 + later), strict=True):
        model.forward(text.e_TD, torch.arange(first, first + T), arena.pack([row], [T]))
    slots = [0, 3, 4]
    arena.rotate(rows[0], slots, later, model.inv_freq)
    turned, fed = (arena.export(row)["keys"][0] for row in rows)  # deeper layers see other positions in attention
    scale = fed.abs().max()
    assert (turned - fed)[:, slots].abs().max() < 1e-5 * scale  # the model's own angles are float32
    others = [slot for slot in range(T) if slot not in slots]
    assert (turned - fed)[:, others].abs().max() > 1e-2 * scale


def test_an_unmerged_adapter_is_run():
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    base = random_qwen3()
    plain = full_forward(script(12, 4).e_TD, {}, base)
    adapted = get_peft_model(base, lora).to(torch.float64)
    text = script(12, units=4)
    with torch.no_grad():
        expected = adapted(inputs_embeds=text.e_TD[None]).logits[0]
    over = Qwen3OverArena(adapted)
    streamed = stream(over, Conversation(KVArena(over.shape, 1, 200), unbounded(), None), text)
    assert (streamed - expected).abs().max() < EXACT
    assert (expected - plain).abs().max() > 1e-2


def test_a_wrapped_model_still_answers_plain_calls():
    stock = random_qwen3()
    ids = torch.randint(0, VOCAB, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        before = stock(ids, attention_mask=mask).logits
        over = Qwen3OverArena(stock)
        assert torch.equal(stock(ids, attention_mask=mask).logits, before)
    assert torch.equal(over.embed(ids[0]), stock.model.embed_tokens.weight[ids[0]])
    assert (over.shape.layers, over.shape.kv_heads, over.shape.head_dim, over.shape.vocab) == (3, 2, 16, VOCAB)


def test_sliding_windows_are_refused():
    config = Qwen3Config(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, use_sliding_window=True, sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"layers \[1\]"):
        Qwen3OverArena(Qwen3ForCausalLM(config))


def test_the_short_form_is_the_stock_modules():
    """float32: both forms against float64, so that neither is further from it than float32 goes."""
    text = script(13, units=12)
    exact = Qwen3OverArena(random_qwen3())
    short, stock = (Qwen3OverArena(random_qwen3(dtype=torch.float32), stock=s) for s in (None, True))
    runs = []
    for over in (exact, short, stock):
        who = Conversation(KVArena(over.shape, 1, 300), a2t(2), 40)
        runs.append(stream(over, who, Script(text.e_TD.to(over.shape.dtype), text.kinds)).double())
    scale = runs[0].abs().max()
    assert short._packed is not None
    assert stock._packed is None
    assert exact._packed is None
    assert (runs[1] - runs[0]).abs().max() < 2e-5 * scale
    assert (runs[2] - runs[0]).abs().max() < 2e-5 * scale


def test_an_adapter_put_on_later_is_run():
    base, text = random_qwen3(dtype=torch.float32), script(14, units=2, dtype=torch.float32)
    over = Qwen3OverArena(base)
    before = stream(over, Conversation(KVArena(over.shape, 1, 100), unbounded(), None), text)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))
    with torch.no_grad():
        expected = adapted(inputs_embeds=text.e_TD[None]).logits[0]
    after = stream(over, Conversation(KVArena(over.shape, 1, 100), unbounded(), None), text)
    assert (after - expected).abs().max() < 1e-4
    assert (after - before).abs().max() > 1e-2


def test_states_can_enter_a_loss(model):
    arena = KVArena(model.shape, 1, 10)
    h_TD = model.forward(torch.randn(3, HIDDEN).double(), torch.arange(3), arena.pack([arena.allocate()], [3]))
    weight = torch.ones(HIDDEN, dtype=torch.float64, requires_grad=True)
    (h_TD * weight).square().sum().backward()
    assert torch.isfinite(weight.grad).all()
