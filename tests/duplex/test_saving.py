"""Save and restore bit for bit; rebuild from the journal; ask without touching the live cache."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import ConversationConfig, Engine, EngineConfig
from a2t.duplex.journal import Journal
from a2t.kv.cache import ArenaFull
from a2t.kv.kinds import TEXT, Kind
from tests.duplex.stub import UNIT, StubModel, StubState, noise

UNTIMED = EngineConfig(side_channel_budget_s=None)
SAMPLED = DuplexConfig(greedy=False, repetition_penalty=1.05, length_penalty=1.1, seed=2)
CONFIG = ConversationConfig(70, policy_options={"retention_units": 2}, duplex=SAMPLED, audio_units_kept=2)
PCM = noise(12.5)


def cache(engine, conversation):
    engine.settle(conversation)
    return engine.arena.export(conversation.row)


def told(finished):
    return [
        (result.tokens, result.transcript_text, result.response_text, stats.residents) for _, result, stats in finished
    ]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_restored_conversation_continues_bit_for_bit(tmp_path, in_flight):
    model = StubModel(5)
    engine = Engine(model, config=UNTIMED)
    conversation = engine.open(CONFIG, id="call")
    engine.push(conversation, PCM[:130000])  # eight units and a piece
    before = []
    if in_flight:
        while len(before) < 7:
            before += engine.step()
        engine.step()
    else:
        before = engine.run()
    assert sum(stats.evicted for *_, stats in before) > 20
    engine.push(conversation, PCM[130000:140000], force_listen=True)  # kept for the ninth unit
    engine.save(conversation, tmp_path)
    before += engine.step() if in_flight else []
    other = Engine(model, rows=3, config=UNTIMED)
    other.push(other.open(), noise(1))  # another row than before
    other.run()
    copy = other.restore(tmp_path)
    assert copy.id == "call" and copy.units == conversation.units == len(before)
    after = []
    for one, c in ((engine, conversation), (other, copy)):
        one.push(c, PCM[140000:])
        after.append(one.run())
    assert told(after[0]) == told(after[1]) and len(before) + len(after[0]) == 12
    assert after[0][0 if len(before) == 8 else 8 - len(before)][1].listening, "the forced unit is still forced"
    for name, tensor in cache(engine, conversation).items():
        assert torch.equal(tensor, cache(other, copy)[name])
    assert conversation.ledger.to_json() == copy.ledger.to_json()
    assert conversation.loop.state_dict() == copy.loop.state_dict()
    assert conversation.journal.to_json() == copy.journal.to_json()


def test_damaged_or_foreign_folders_are_refused(tmp_path):
    model = StubModel(5)
    engine = Engine(model, rows=2, config=UNTIMED)
    conversation = engine.open(id="call")
    engine.push(conversation, noise(2))
    engine.run()
    engine.save(conversation, tmp_path)
    with pytest.raises(ValueError, match="already open"):
        engine.restore(tmp_path)
    engine.close(conversation)
    values, tensors = (tmp_path / "conversation.json").read_text(), load_file(tmp_path / "conversation.safetensors")

    def attempt(match):
        with pytest.raises(ValueError, match=match):
            engine.restore(tmp_path)
        assert not engine.conversations and engine.arena.free_rows == 3

    (tmp_path / "conversation.json").write_text(json.dumps({**json.loads(values), "model": "another"}))
    attempt("another")
    (tmp_path / "conversation.json").write_text(values[:-40])
    attempt("damaged")
    (tmp_path / "conversation.json").write_text(values)
    cut = {name: t[:, :, :-1].contiguous() if name.startswith("cache.") else t for name, t in tensors.items()}
    save_file(cut, tmp_path / "conversation.safetensors")
    attempt("ledger lists")
    save_file(
        {n: t.float() if n.startswith("cache.") else t for n, t in tensors.items()},
        tmp_path / "conversation.safetensors",
    )
    attempt("float32")
    (tmp_path / "conversation.safetensors").unlink()
    attempt("conversation.safetensors is missing")
    save_file(tensors, tmp_path / "conversation.safetensors")
    assert engine.restore(tmp_path).units == 2


def by_position(engine, conversation):
    """Keys and values in order of position, with positions, kinds and units."""
    ledger = conversation.ledger
    order = sorted(range(len(ledger)), key=ledger.positions.__getitem__)
    tensors = {name: t[:, :, order] for name, t in cache(engine, conversation).items()}
    return [(ledger.positions[s], ledger.kinds[s], ledger.units[s]) for s in order], tensors


def test_with_all_its_audio_the_journal_rebuilds_the_very_cache():
    model = StubModel(5)
    engine, other = Engine(model, config=UNTIMED), Engine(model, config=UNTIMED)
    config = ConversationConfig(None, "unbounded", duplex=SAMPLED, audio_units_kept=50)
    conversation = engine.open(config)
    engine.push(conversation, PCM[:80000])
    engine.run()
    engine.push(conversation, PCM[80000:120000])  # heard, not yet processed
    copy = Journal.from_json(json.loads(json.dumps(conversation.journal.to_json()))).rebuild(other)
    after = [one.run() for one in (engine, other)]
    assert told(after[0]) == told(after[1]) and len(after[0]) == 2
    (books, tensors), (copied_books, copied) = by_position(engine, conversation), by_position(other, copy)
    assert books == copied_books
    for name in tensors:
        assert (tensors[name] - copied[name]).abs().max() < 1e-10
    assert copy.journal.to_json() == conversation.journal.to_json()


def test_after_evictions_the_journal_rebuilds_prefix_text_and_the_last_units():
    model = StubModel(5)
    engine, other = Engine(model, config=UNTIMED), Engine(model, config=UNTIMED)
    conversation = engine.open(
        ConversationConfig(0, policy_options={"retention_units": 2}, duplex=SAMPLED, audio_units_kept=2)
    )
    engine.push(conversation, PCM[:144000])
    engine.run()
    copy = conversation.journal.rebuild(other)
    assert other.run() == [] and copy.units == 9
    books, _ = by_position(engine, conversation)
    assert by_position(other, copy)[0] == books, "the same positions are resident, kind by kind and unit by unit"
    assert {k for _, k, _ in books} >= {Kind.PREFIX, Kind.AUDIO, *TEXT} and max(p for p, *_ in books) > len(books)
    assert copy.ledger.next_position == conversation.ledger.next_position
    assert copy.loop.state_dict() == conversation.loop.state_dict()
    other.push(copy, PCM[144000:])
    assert [result.unit for _, result, _ in other.run()] == [9, 10, 11]
    with pytest.raises(ValueError, match="capacity is 100"):
        conversation.journal.rebuild(Engine(model, capacity=100, config=UNTIMED))


def test_where_text_folds_what_had_left_the_cache_needs_no_room_in_another():
    model, capacity = StubModel(5), 220
    engine, other = (Engine(model, capacity=capacity, config=UNTIMED) for _ in range(2))
    options = {"retention_units": 2, "text_tier": "fold"}
    conversation = engine.open(ConversationConfig(60, policy_options=options, duplex=SAMPLED, audio_units_kept=2))
    while len([i for u in conversation.journal.units for i in (*(u.transcript_ids or ()), *u.response_ids)]) < capacity:
        engine.push(conversation, PCM)
        engine.run()
    copy = conversation.journal.rebuild(other)
    assert other.run() == []
    books, rebuilt = by_position(engine, conversation)[0], by_position(other, copy)[0]
    assert set(books) <= set(rebuilt) and len(rebuilt) <= 60, "as much as the budget allows, so perhaps older text"
    for one, c in ((engine, conversation), (other, copy)):
        one.push(c, PCM[: 3 * UNIT])
    assert [len(one.run()) for one in (engine, other)] == [3, 3]


class AheadState(StubState):
    """Of an encoder that looks a quarter of a unit ahead."""

    @property
    def units_ready(self) -> int:
        return max(0, len(self.pcm_S) - UNIT // 4) // UNIT


def test_a_rebuilt_conversation_hears_no_second_twice_where_the_encoder_looks_ahead():
    model = StubModel(5)
    model.encoder.new_state = lambda: AheadState(model.encoder.hidden, model.encoder.dtype)
    engine, other = Engine(model, config=UNTIMED), Engine(model, config=UNTIMED)
    conversation = engine.open(ConversationConfig(None, "unbounded", duplex=SAMPLED, audio_units_kept=50))
    engine.push(conversation, PCM[: 5 * UNIT + UNIT // 2])
    assert len(engine.run()) == 5
    copy = conversation.journal.rebuild(other)
    assert other.run() == [], "all that was heard to its end is known"
    for one, c in ((engine, conversation), (other, copy)):
        one.push(c, PCM[5 * UNIT + UNIT // 2 : 8 * UNIT])
    after = [one.run() for one in (engine, other)]
    assert told(after[0]) == told(after[1]) and len(after[0]) == 2
    assert by_position(engine, conversation)[0] == by_position(other, copy)[0]


def test_what_was_heard_and_not_processed_is_processed_after_a_rebuild_whose_audio_does_not_go_back_to_the_start():
    model = StubModel(5)
    engine, other = Engine(model, config=UNTIMED), Engine(model, config=UNTIMED)
    conversation = engine.open(CONFIG)
    engine.push(conversation, PCM[: 8 * UNIT])
    engine.run()
    engine.push(conversation, PCM[8 * UNIT : 11 * UNIT])
    copy = conversation.journal.rebuild(other)
    assert [result.unit for _, result, _ in other.run()] == [8, 9, 10]
    assert copy.journal.audio_S.tolist() == PCM[9 * UNIT : 11 * UNIT].tolist()


def test_the_journal_keeps_the_last_units_of_audio_only():
    engine = Engine(StubModel(5), config=UNTIMED)
    conversation = engine.open(CONFIG)
    for start in range(0, 72000, 7000):
        engine.push(conversation, PCM[start : min(start + 7000, 72000)])
        engine.run()
    kept = conversation.journal.audio_S
    assert (kept == PCM[32000:72000]).all(), "two finished units and the half that waits"


def test_a_question_is_answered_on_a_scratch_row_while_the_conversation_goes_on():
    model = StubModel(5)
    model.bias_V[model.tokenizer.ids["<|turn_eos|>"]] = 0.0  # longer answers
    engine, twin = Engine(model, config=UNTIMED), Engine(model, config=UNTIMED)
    results, journal, answer = [], Journal(), ""
    for one in (engine, twin):
        conversation = one.open(CONFIG)
        one.push(conversation, PCM[:64000])
        done = []
        while len(done) < 2:
            done += one.step()
        if one is engine:
            done += one.step()  # in the middle of a unit
            journal = Journal.from_json(conversation.journal.to_json())
            answer = one.ask(conversation, "door lamp", max_tokens=6)
            assert one.arena.free_rows == 1
        results.append((told(done + one.run()), cache(one, conversation), conversation.ledger.to_json()))
    (said, tensors, books), (expected, untouched, expected_books) = results
    assert said == expected and books == expected_books
    for name in tensors:
        assert (tensors[name] - untouched[name]).abs().max() < 1e-10
    # the same by the stock model, nothing cached
    assert journal.transcript_ids, "something was written"
    tokens, tokenizer = engine.tokens, model.tokenizer
    ids = (
        tokenizer.encode(model.default_prompt) + journal.transcript_ids + tokenizer.encode("door lamp") + [tokens.speak]
    )
    reply: list[int] = []
    while len(reply) < 6:
        with torch.no_grad():
            logits_V = model.qwen(torch.tensor([ids + reply])).logits[0, -1] + model.bias_V
        logits_V[[tokens.asr_start, tokens.asr_end, tokens.tts_pad]] = -torch.inf
        if (token := int(logits_V.argmax())) in tokens.terminators | {tokens.turn_eos}:
            break
        reply.append(token)
    assert reply and answer == tokenizer.decode(reply)
    with pytest.raises(ValueError, match="empty"):
        engine.ask(conversation, " ")
    with pytest.raises(ValueError, match="larger capacity"):
        Engine(model, capacity=40, config=UNTIMED).ask(journal, "door", max_tokens=40)


def test_scratch_rows_are_limited():
    engine = Engine(StubModel(5), rows=3, config=UNTIMED)
    journal = engine.open().journal
    first = engine.submit(journal, "door", 2)
    with pytest.raises(ArenaFull, match="scratch"):
        engine.submit(journal, "door", 2)
    engine.run()
    assert first.done and engine.arena.free_rows == 3
