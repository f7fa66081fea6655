"""Fewer forwards, the same conversation: drafts and held-over tokens, and four hours within a budget."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import ConversationConfig, Engine, EngineConfig
from a2t.duplex.protocol import AUDIO_ID
from a2t.kv.kinds import Kind
from a2t.kv.shape import LanguageShape
from tests.duplex.stub import AUDIO, BIAS, UNIT, StubModel, WordTokenizer, noise

UNTIMED = EngineConfig(side_channel_budget_s=None)
DUPLEX = DuplexConfig(max_new_speak_tokens_per_chunk=6, max_transcript_tokens=6, seed=1)
KINDS = [
    ConversationConfig(70, policy_options={"retention_units": 1, "text_tier": "fold"}, duplex=DUPLEX),
    ConversationConfig(0, policy_options={"retention_units": 2, "text_tier": "fold"}, duplex=DUPLEX),
    ConversationConfig(None, "streaming_llm", {"recent": 50}, DUPLEX),
]


class Talkative(StubModel):
    """Goes on with words, or ends, where it has just opened a segment or said a word: segments are not empty."""

    def __init__(self):
        super().__init__(6, bias=BIAS | {"<|listen|>": 9.0, "<|asr_start|>": 9.5})
        ids, first_word = self.tokenizer.ids, self.tokenizer.specials
        self.after = {ids["<|asr_start|>"], *range(first_word, len(ids))}
        self.likely = [ids["<|asr_end|>"], ids["<|turn_eos|>"], ids["<|chunk_eos|>"], *range(first_word, len(ids))]
        self.fed = []

    def forward(self, e_TD, positions_T, batch):
        self.fed = [i for feed in batch.feeds for i in feed.ids[len(feed.ids) - feed.want :]]
        return super().forward(e_TD, positions_T, batch)

    def logits(self, h_ND):
        logits_NV = super().logits(h_ND)
        rows = [n for n, token in enumerate(self.fed) if token in self.after]
        logits_NV[torch.tensor(rows, dtype=torch.long)[:, None], self.likely] += 8
        return logits_NV


def streamed(model, config, conversations, units, piece=10):
    """Tokens of every unit of every conversation, and how many forwards they took. A third of the units is forced."""
    engine = Engine(model, conversations, 512, config=UNTIMED)
    opened = [engine.open(config(n), id=str(n)) for n in range(conversations)]
    told, forwards = {c.id: [] for c in opened}, 0
    for lump in range(units // piece):
        for n, c in enumerate(opened):
            pcm_S = noise(piece, 1000 * lump + n)
            engine.push(c, pcm_S[: UNIT * 3], force_listen=lump % 4 == 3)
            engine.push(c, pcm_S[UNIT * 3 :])
        for c, result, stats in engine.run():
            told[c.id].append((result.tokens, result.response_ids, result.end_of_turn, stats.residents))
            forwards += stats.forwards
    return told, forwards


def test_greedy_output_is_the_same_with_and_without_drafts_over_10_000_units():
    """Every unit's tokens; a draft that was taken back and left a trace in the cache would change what comes after."""
    model = Talkative()
    both = [
        streamed(model, lambda n, draft=draft: _kind(n, draft=draft), conversations=50, units=200)
        for draft in (True, False)
    ]
    (drafted, few), (plain, more) = both
    assert drafted == plain and sum(map(len, plain.values())) == 10_000
    units = [tokens for told in plain.values() for tokens, *_ in told]
    listened, opened = (sum(f(u) for u in units) for f in (lambda u: len(u.native) == 1, lambda u: bool(u.segment)))
    assert 1000 < listened < 9500 and opened > 500, "there was much to get wrong"
    assert few < 0.9 * more


def _kind(n, **duplex):
    config = KINDS[n % len(KINDS)]
    return replace(config, duplex=replace(config.duplex, **duplex))


def test_drawn_output_is_the_same_with_and_without_drafts():
    model = StubModel(6)
    drafted, plain = (
        streamed(model, lambda n, d=draft: _kind(n, draft=d, greedy=False, seed=n), conversations=8, units=30)[0]
        for draft in (True, False)
    )
    assert drafted == plain


class Script:
    """A model without weights that says what a script tells it: in unit u it listens and writes `words(u)`, or speaks
    them if `speaks(u)`. Its keys and values are zeros; the arena, the ledger and the engine are real."""

    name, default_prompt = "script", "green hat"

    def __init__(self, words, speaks=lambda unit: False):
        self.words, self.speaks = words, speaks
        self.tokenizer = WordTokenizer()
        self.shape = LanguageShape(1, 1, 2, 4, len(self.tokenizer.vocabulary), torch.float32, torch.device("cpu"))
        self.encoder = Silence()
        self.unit, self.left, self.fed = -1, [], []

    def embed(self, ids_T):
        self.fed = ids_T.tolist()
        return torch.zeros(len(ids_T), 4)

    def forward(self, e_TD, positions_T, batch):
        batch.update(0, torch.zeros(1, 1, len(e_TD), 2), torch.zeros(1, 1, len(e_TD), 2))
        batch.commit()
        return e_TD

    def logits(self, h_ND):
        ids = self.tokenizer.ids
        out = torch.zeros(len(h_ND), self.shape.vocab)
        for row_V, token in zip(out, self.fed[-len(h_ND) :], strict=True):
            if token == 0:  # audio
                self.unit += 1
                self.left = [*self.words(self.unit)]
                says = ids["<|speak|>" if self.speaks(self.unit) else "<|listen|>"]
            elif token == ids["<|listen|>"]:
                says = ids["<|asr_start|>"] if self.left else ids["amber"]
            elif token == ids["<|asr_start|>"] or token >= self.tokenizer.specials or token == ids["<|speak|>"]:
                end = "<|turn_eos|>" if self.speaks(self.unit) else "<|asr_end|>"
                says = self.left.pop(0) if self.left else ids[end]
            else:
                says = ids["<|chunk_eos|>"]
            row_V[says] = 1
        return out


class Silence:
    embeddings_per_unit, samples_per_unit = AUDIO, UNIT

    def new_state(self):
        return Waiting()

    def encode(self, states):
        for state in states:
            state.units_ready -= 1
        return torch.zeros(len(states), AUDIO, 4)


class Waiting:
    units_ready = nbytes = 0

    def push(self, pcm_S):
        self.units_ready += len(pcm_S) // UNIT


@pytest.mark.parametrize(("words", "forwards"), [(3, 4), (0, 1), (1, 2)])
def test_a_listening_unit_takes_one_forward_and_one_for_each_word(words, forwards):
    model = Script(lambda unit: [20 + n for n in range(words)])
    engine = Engine(model, config=UNTIMED)
    conversation = engine.open()
    engine.run()
    for _ in range(20):
        engine.push(conversation, np.zeros(UNIT, np.float32))
        ((_, result, stats),) = engine.run()
        assert len(result.transcript_ids) == words and result.listening and stats.forwards == forwards


def test_four_hours_stay_within_the_budget_and_the_journal_keeps_every_word():
    budget, hours, most = 400, 4, []

    def words(unit):
        return [20 + (unit * 7 + n) % 20 for n in range(3)] if unit % 3 == 1 else []

    def observe(conversation, feed, positions, h_TD):
        largest = budget + 1 + AUDIO + 1 + 5 + 4  # a unit's positions: the longest there is here
        most.append(conversation.ledger.residents)
        assert most[-1] <= largest, f"{most[-1]} residents"

    model = Script(words, speaks=lambda unit: unit % 10 == 4)
    engine = Engine(model, capacity=600, config=UNTIMED, observer=observe)
    where = engine.arena.kv_N2RHCD.data_ptr()
    conversation = engine.open(ConversationConfig(budget, policy_options={"text_tier": "fold"}))
    heard = said = 0
    for unit in range(hours * 3600):
        engine.push(conversation, np.zeros(UNIT, np.float32))
        for _, result, stats in engine.run():
            heard, said = heard + len(result.transcript_ids), said + len(result.response_ids)
            assert stats.total_residents <= budget, f"unit {unit}"
    assert conversation.units == hours * 3600 and max(most) > budget
    assert engine.arena.kv_N2RHCD.data_ptr() == where
    journal = conversation.journal
    expected = [i for u in range(hours * 3600) if u % 10 != 4 for i in words(u)]
    assert journal.transcript_ids == expected and heard == len(expected) > 20 * budget and said > budget
    assert conversation.ledger.counts()[Kind.PREFIX] == 2
    conversation.ledger.check()
    assert len(journal.audio_S) == 8 * UNIT


def test_growing_text_exceeds_the_budget_as_published():
    model = Script(lambda unit: [21, 22, 23])
    engine = Engine(model, config=UNTIMED)
    conversation = engine.open(ConversationConfig(100))
    engine.push(conversation, np.zeros(60 * UNIT, np.float32))
    *_, (_, _, stats) = engine.run()
    assert stats.residents[Kind.TRANSCRIPT] == 180 and stats.total_residents > 180 > 100
    assert AUDIO_ID < 0
