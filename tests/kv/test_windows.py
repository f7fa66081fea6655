"""MiniCPM-o's two windows on the books: whole units leave, positions stay without gaps, text is kept as told.

What they do to keys and logits is held against the official code's own run in tests/models/test_minicpmo.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2t.kv.eviction import Eviction
from a2t.kv.kinds import Kind
from a2t.kv.ledger import Ledger
from a2t.kv.policies import make_policy
from a2t.kv.windows import BasicWindow, ContextWindow, ReadsText

PROMPT, SUFFIX, MARKER, SPECIAL = 7, (1, 2), (3, 4, 5), (9,)


def feed(ledger: Ledger, unit: int, said: int) -> None:
    ledger.append([Kind.MARKER] + [Kind.AUDIO] * 10, unit)
    ledger.append([Kind.DECISION] + [Kind.RESPONSE] * said + [Kind.TERMINATOR], unit)


def carry_out(ledger: Ledger, eviction: Eviction) -> None:
    ledger.drop(eviction.drop)
    if eviction.rotation is not None:
        first = eviction.rotation.first
        ledger.shift(ledger.slots(lambda r: r.position >= first), eviction.rotation.delta)
    if eviction.refeed is not None:
        ledger.insert([Kind.PREFIX] * len(eviction.refeed.ids), eviction.refeed.first)
    ledger.check()


def without_gaps(ledger: Ledger) -> bool:
    return sorted(ledger.positions) == list(range(ledger.next_position))


@given(said=st.lists(st.integers(0, 12), max_size=40), low=st.integers(20, 120), more=st.integers(0, 80))
def test_basic_drops_whole_units_between_its_marks(said: list[int], low: int, more: int) -> None:
    ledger, policy = Ledger(), BasicWindow(high=low + more, low=low)
    ledger.append([Kind.PREFIX] * PROMPT, -1)
    for unit, n in enumerate(said):
        feed(ledger, unit, n)
        before, held = ledger.residents, sorted(set(ledger.units) - {-1})
        eviction = policy.plan_eviction(ledger, 0)
        carry_out(ledger, eviction)
        left = sorted(set(ledger.units) - {-1})
        assert without_gaps(ledger) and ledger.counts()[Kind.PREFIX] == PROMPT
        assert left == held[len(held) - len(left) :] and list(eviction.units) == held[: len(held) - len(left)]
        for kept in left:  # whole
            assert ledger.units.count(kept) == 13 + said[kept]
        if before <= low + more:
            assert not eviction
        else:  # no more left than needed
            oldest = 13 + said[eviction.units[-1]]
            assert ledger.residents <= max(low, PROMPT) and ledger.residents + oldest > low


@given(
    spoken=st.lists(st.lists(st.integers(6, 12), max_size=6), max_size=30),
    units=st.integers(1, 8),
    most=st.integers(1, 9),
)
def test_context_keeps_the_latest_units_and_the_latest_text(spoken: list[list[int]], units: int, most: int) -> None:
    policy = ContextWindow(SUFFIX, MARKER, SPECIAL, max_units=units, previous_max_tokens=most)
    assert isinstance(policy, ReadsText) and not isinstance(BasicWindow(), ReadsText)
    ledger = Ledger()
    ledger.append([Kind.PREFIX] * PROMPT, -1)
    prefix = [0] * (PROMPT - len(SUFFIX)) + list(SUFFIX)
    for unit, said in enumerate(spoken):
        feed(ledger, unit, len(said))
        eviction = policy.plan_with_text(ledger, spoken[:unit])
        carry_out(ledger, eviction)
        if eviction.refeed is not None:
            prefix = [0] * (PROMPT - len(SUFFIX)) + list(eviction.refeed.ids)
            assert eviction.refeed.first == PROMPT - len(SUFFIX)
        text = [i for s in spoken[: max(0, unit + 1 - units)] for i in s if i not in SPECIAL][-most:]
        assert prefix[PROMPT - len(SUFFIX) :] == ([*MARKER, *text] if text else []) + list(SUFFIX)
        assert without_gaps(ledger) and ledger.counts()[Kind.PREFIX] == len(prefix)
        assert sorted(set(ledger.units) - {-1}) == list(range(max(0, unit + 1 - units), unit + 1))
        first = [p for p, u in zip(ledger.positions, ledger.units, strict=True) if u == -1]
        assert sorted(first) == list(range(len(prefix)))  # the prefix comes first


def test_their_settings_are_checked() -> None:
    assert make_policy("basic", high=400, low=300) == BasicWindow(400, 300)
    for name, options in (("basic", {"high": 3, "low": 4}), ("basic", {"low": 0}), ("context", {"max_units": 0})):
        with pytest.raises(ValueError, match="give"):
            make_policy(name, **options)
    with pytest.raises(ValueError, match="plan_with_text"):
        ContextWindow().plan_eviction(Ledger(), 10)


def test_a_prefix_is_booked_before_units_only_where_there_is_room() -> None:
    ledger = Ledger()
    ledger.append([Kind.PREFIX] * 3, -1)
    feed(ledger, 0, 0)
    with pytest.raises(ValueError, match="in the way"):
        ledger.insert([Kind.PREFIX], 3)
    ledger.shift(ledger.slots(lambda r: r.unit == 0), 2)
    assert list(ledger.insert([Kind.PREFIX] * 2, 3)) == [3, 4]
    ledger.check()
    assert without_gaps(ledger)
    with pytest.raises(ValueError, match="in the way"):
        ledger.insert([Kind.PREFIX], ledger.next_position)
