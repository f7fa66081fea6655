import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a2t.kv.kinds import EVICTABLE, TEXT, Kind
from a2t.kv.ledger import Ledger, Tier, swap_moves
from a2t.kv.policies import a2t, make_policy, streaming_llm
from tests.kv.unit_sequences import Held, PlainA2T, decode_step, residents

PREFIX = 7
UNIT_SEQUENCES = st.binary(min_size=1, max_size=12)
# (budget, retention units, text tier): the floor, no window, tight, loose, a window longer than the sequence
SETTINGS = [(0, 5, "grow"), (20, 0, "fold"), (35, 2, "fold"), (55, 5, "grow"), (20, 20, "grow")]


@pytest.mark.parametrize(("budget", "retention", "tier"), SETTINGS)
def test_random_unit_sequences_never_break_the_books(budget, retention, tier):
    """Five settings of 2,000 sequences each: 10,000. The arena is played by a list that follows the moves alone."""

    @settings(max_examples=2000)
    @given(UNIT_SEQUENCES)
    def run(sequence: bytes) -> None:
        policy = a2t(retention, tier)
        ledger, plain, arena = Ledger(), PlainA2T(budget, retention, tier == "fold"), list(range(PREFIX))
        ledger.append([Kind.PREFIX] * PREFIX, -1)
        plain.feed([Kind.PREFIX] * PREFIX, -1)
        most = PREFIX
        for unit, byte in enumerate(sequence):
            step = decode_step(byte)
            arena.extend(ledger.append(step.kinds, unit))
            plain.feed(step.kinds, unit)
            most = max(most, len(arena))
            if not step.evict:
                continue
            before = residents(ledger)
            eviction = policy.plan_eviction(ledger, budget)
            for source, target in ledger.drop(eviction.drop):
                arena[target] = arena[source]
            del arena[len(arena) - len(eviction.drop) :]
            plain.evict(unit)

            after = residents(ledger)
            gone = before - after
            allowed = EVICTABLE | (TEXT if tier == "fold" else set())
            assert all(h.kind in allowed and h.unit <= unit - retention for h in gone)
            assert {h.unit for h in gone if h.kind in EVICTABLE} == set(eviction.units)
            assert {h.unit for h in gone if h.kind in TEXT} == set(eviction.folded_units)
            eligible = [h for h in after if h.kind in allowed and h.unit <= unit - retention]
            assert ledger.residents <= budget or not eligible
            assert after == set(plain.held)
        assert residents(ledger) == set(plain.held)
        assert arena == ledger.positions
        assert ledger.next_position == plain.next_position
        assert ledger.peak == most
        assert ledger.counts() == {kind: sum(h.kind is kind for h in plain.held) for kind in Kind}
        ledger.check()

    run()


@settings(max_examples=300)
@given(UNIT_SEQUENCES, st.integers(0, 6), st.integers(0, 60))
def test_streaming_llm_keeps_the_first_and_the_latest(sequence, sink, recent):
    policy, ledger = streaming_llm(sink, recent), Ledger()
    ledger.append([Kind.PREFIX] * 3, -1)
    fed = 3
    for unit, byte in enumerate(sequence):
        step = decode_step(byte)
        fed += len(ledger.append(step.kinds, unit))
        ledger.drop(policy.plan_eviction(ledger, None).drop)
        expected = set(range(min(sink, fed))) | set(range(max(0, fed - recent), fed))
        assert set(ledger.positions) == expected
    ledger.check()


@settings(max_examples=300)
@given(st.data(), st.integers(0, 60))
def test_moves_keep_the_survivors_dense(data, length):
    drop = data.draw(st.sets(st.integers(0, max(0, length - 1)), max_size=length))
    row = list(range(length))
    moves = swap_moves(length, drop)
    for source, target in data.draw(st.permutations(moves)):  # the order of the moves does not matter
        row[target] = row[source]
    assert sorted(row[: length - len(drop)]) == sorted(set(range(length)) - drop)
    assert len(moves) <= len(drop)


@pytest.mark.parametrize("drop", [[3], [-1], [0, 0], [0, 7]])
def test_moves_refuse_slots_that_are_not_there(drop):
    with pytest.raises(ValueError, match=r"slots"):
        swap_moves(3, drop)


@settings(max_examples=200)
@given(UNIT_SEQUENCES, UNIT_SEQUENCES)
def test_a_restored_ledger_goes_on_as_the_original(first, second):
    ledger, policy = Ledger(), a2t(2)
    for unit, byte in enumerate(first):
        ledger.append(decode_step(byte).kinds, unit)
        ledger.drop(policy.plan_eviction(ledger, 30).drop)
    restored = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
    for unit, byte in enumerate(second, start=len(first)):
        for books in (ledger, restored):
            books.append(decode_step(byte).kinds, unit)
            books.drop(policy.plan_eviction(books, 30).drop)
        assert restored.to_json() == ledger.to_json()
    restored.check()


def test_a_damaged_file_is_refused():
    ledger = Ledger()
    ledger.append([Kind.AUDIO] * 3, 0)
    for key, value in [
        ("positions", [0, 0, 1]),
        ("units", [0, 0]),
        ("next_position", 1),
        ("units", [0, 1, 9]),
        ("peak", 2),
    ]:
        with pytest.raises(ValueError, match="damaged"):
            Ledger.from_json(ledger.to_json() | {key: value})


def test_units_are_fed_in_order():
    ledger = Ledger()
    ledger.append([Kind.AUDIO], 4)
    with pytest.raises(ValueError, match="unit 3 was fed after unit 4"):
        ledger.append([Kind.AUDIO], 3)
    assert ledger.residents == 1


def test_reading_by_slot_unit_and_predicate():
    ledger = Ledger()
    ledger.append([Kind.PREFIX] * 2, -1)
    ledger.append([Kind.MARKER, Kind.AUDIO, Kind.DECISION, Kind.ASR, Kind.TRANSCRIPT, Kind.ASR, Kind.TERMINATOR], 0)
    assert ledger.slots(lambda r: r.kind is Kind.TRANSCRIPT) == [6]
    assert ledger.unit_slots(0, Tier.EVICTABLE) == {2, 3, 4, 5, 7, 8}
    assert ledger.drop([2, 3]) == [(7, 2), (8, 3)]
    assert ledger.positions == [0, 1, 7, 8, 4, 5, 6]
    assert [ledger.positions[slot] for slot in ledger.by_age()] == [0, 1, 4, 5, 6, 7, 8]
    assert (ledger.slot_at(8), ledger.slot_at(2)) == (3, None)


def test_closing_a_gap_renumbers_what_stays():
    ledger = Ledger()
    ledger.append([Kind.PREFIX] * 2, -1)
    ledger.append([Kind.AUDIO] * 3, 0)
    ledger.append([Kind.AUDIO] * 2, 1)
    ledger.drop(ledger.unit_slots(0, Tier.EVICTABLE))
    ledger.shift(ledger.slots(lambda r: r.unit == 1), -3)
    assert residents(ledger) == {
        Held(0, Kind.PREFIX, -1),
        Held(1, Kind.PREFIX, -1),
        Held(2, Kind.AUDIO, 1),
        Held(3, Kind.AUDIO, 1),
    }
    assert list(ledger.append([Kind.AUDIO], 2)) == [4]
    ledger.check()
    with pytest.raises(ValueError, match="collide"):
        ledger.shift(ledger.slots(lambda r: r.unit == 1), -1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a2 t", {}, "choose one of a2t, unbounded, streaming_llm"),
        ("a2t", {"sink": 4}, "no option sink; it takes retention_units, text_tier"),
        ("unbounded", {"sink": 4}, "takes none"),
        ("a2t", {"text_tier": "shrink"}, "'shrink'"),
        ("a2t", {"retention_units": -1}, "-1"),
        ("streaming_llm", {"recent": -1}, "-1"),
    ],
)
def test_a_wrong_policy_is_named_with_its_remedy(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_policy(name, **options)


def test_policies_by_name():
    assert make_policy("a2t", retention_units=3) == a2t(3)
    assert make_policy("streaming_llm") == streaming_llm(sink=4, recent=2000)
    ledger = Ledger()
    ledger.append([Kind.AUDIO] * 100, 0)
    ledger.append([Kind.AUDIO] * 100, 1)
    assert not make_policy("unbounded").plan_eviction(ledger, 0)
    assert make_policy("a2t", retention_units=1).plan_eviction(ledger, None).drop == ()
    assert make_policy("a2t", retention_units=1).plan_eviction(ledger, 150).drop == tuple(range(100))
