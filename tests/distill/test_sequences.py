"""Pairs are aligned by event, targets lie where DESIGN.md section 5 puts them, joined streams keep their parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from a2t.distill.config import DistillConfig, EvictionSettings
from a2t.distill.corpus import Examples, Joined
from a2t.distill.sequences import NEVER, Example, Group, draw_budget, hidden_from, join, pair
from a2t.duplex.protocol import SpecialTokens, UnitTokens
from a2t.kv.kinds import Kind
from a2t.kv.policies import a2t, unbounded
from tests.distill.samples import TOKENS, make_example

# <unit> 1  </unit> 2  listen 3  speak 4  chunk_eos 7  turn_eos 9  asr_start 10  asr_end 11
T = SpecialTokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


def example(*units: UnitTokens, prefix: tuple[int, ...] = (20,)) -> Example:
    return Example("x", prefix, units, torch.zeros(2 * len(units), 4))


def test_the_four_sorts_of_unit_by_hand():
    p = pair(
        T,
        example(
            UnitTokens((3,), (30, 31)),  # listens and writes
            UnitTokens((3,)),  # listens, nothing to write
            UnitTokens((4, 40, 9, 7), (32,)),  # takes the turn and writes
            UnitTokens((41, 7)),  # goes on speaking, nothing to write
        ),
    )
    # fmt: off
    assert p.student.ids == [20,
        1, -1, -1, 3, 10, 30, 31, 11, 2,
        1, -1, -1, 3, 2,
        1, -1, -1, 4, 10, 32, 11, 40, 9, 7, 2,
        1, -1, -1, 41, 7, 2]
    # fmt: on
    assert p.targets == (
        (4, 10),
        (5, 30),
        (6, 31),
        (7, 11),  # open, write, close
        (13, 2),  # a listening unit without words: what is fed next
        (18, 10),
        (19, 32),
        (20, 11),
    )  # fmt: skip
    assert [(e.position, e.token) for e in p.student.events] == [
        (3, 3),
        (12, 3),
        (17, 4), (21, 40), (22, 9), (23, 7),  # the word after a segment is predicted where the segment closed
        (28, 41), (29, 7),
    ]  # fmt: skip
    assert [(e.position, e.token) for e in p.teacher.events] == [
        (3, 3), (8, 3), (13, 4), (14, 40), (15, 9), (16, 7), (21, 41), (22, 7),
    ]  # fmt: skip
    G = Group
    assert p.groups == (
        G.LISTEN, G.LISTEN, G.SPEAK, G.CONTINUATION, G.TURN_END, G.CONTINUATION, G.OTHER, G.CONTINUATION,
    )  # fmt: skip


@given(seed=st.integers(0, 10**6), units=st.integers(1, 12))
def test_events_are_the_same_predictions_and_targets_never_sit_on_them(seed, units):
    e = make_example(seed, units)
    p = pair(TOKENS, e)
    assert len(p.student) == e.length
    assert len(p.groups) == sum(len(u.native) for u in e.units)
    for t, s in zip(p.teacher.events, p.student.events, strict=True):
        assert (t.token, t.unit, t.first) == (s.token, s.unit, s.first)
        assert p.teacher.ids[t.fed_at] == p.student.ids[s.fed_at] == t.token
    # Taking the segments out of the student leaves the teacher: same ids, kinds and audio.
    side = {Kind.ASR, Kind.TRANSCRIPT}
    rows = [i for i, k in enumerate(p.student.kinds) if k not in side]
    for name in ("ids", "kinds", "units", "audio_index"):
        assert [getattr(p.student, name)[i] for i in rows] == getattr(p.teacher, name)
    at = {e.position for e in p.student.events}
    assert all(position not in at for position, _ in p.targets)
    assert all(p.student.ids[position + 1] == token for position, token in p.targets)
    # Every first decision is held by something: it opens, or a native event or a target stands there.
    opens = {e.fed_at for e in p.student.events if e.first}
    assert opens <= at | {position for position, _ in p.targets}


def test_bad_examples_are_refused():
    with pytest.raises(ValueError, match="3 audio embeddings for 2 units"):
        Example("x", (), (UnitTokens((3,)), UnitTokens((3,))), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="empty segment"):
        Example("x", (), (UnitTokens((3,), ()),), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="2 units and 1 segments"):
        Example.build("x", (), [[3], [3]], [None], torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"no <\|asr_start\|>"):
        pair(SpecialTokens(1, 2, 3, 4, 5, 6, 7, 8, 9), example(UnitTokens((3,))))


@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=30), share=st.floats(0, 1), most=st.integers(1, 60))
def test_joined_streams_hold_every_utterance_once(counts, share, most):
    parts = [Example(f"u{i}", (20,), (UnitTokens((3,)),) * n, torch.full((n, 1), i)) for i, n in enumerate(counts)]
    config = DistillConfig(join_units=most, join_share=share)
    joined = Joined(Examples(parts), config)
    assert joined.ids == Joined(Examples(parts), config).ids
    assert len(set(joined.ids)) == len(joined)
    seen: list[int] = []
    for n in range(len(joined)):
        stream = joined[n]
        assert stream.id == joined.ids[n] and len(stream.units) == joined.units[n]
        origin = stream.audio_AD[:, 0].int().tolist()
        members = sorted(set(origin), key=origin.index)
        assert len(origin) == sum(counts[i] for i in members)
        assert len(members) == 1 or len(origin) <= most
        seen += members
    assert sorted(seen) == list(range(len(counts)))


def test_only_utterances_with_one_prefix_join():
    a, b = example(UnitTokens((3,))), example(UnitTokens((3,)), prefix=(21,))
    with pytest.raises(ValueError, match="differ in prefix"):
        join([a, b])
    assert join([a]) is a


def test_eviction_hides_old_audio_and_structure_and_no_text():
    layout = pair(TOKENS, make_example(3, units=12)).student
    gone = hidden_from(layout, a2t(retention_units=2), 0)
    for position, (kind, unit, until) in enumerate(zip(layout.kinds, layout.units, gone, strict=True)):
        if not kind.evictable or unit > 9:
            assert until == NEVER
        else:  # unit u leaves when unit u + 2 has been fed
            assert until == max(i for i, u in enumerate(layout.units) if u == unit + 2) + 1 > position
    assert set(hidden_from(layout, a2t(), None)) == set(hidden_from(layout, unbounded(), 0)) == {NEVER}


def test_budgets_are_drawn_from_their_key():
    settings = EvictionSettings(probability=0.8, floor=0.25, low=50, high=300)
    draws = [draw_budget(settings, 1000, 0, 0, n) for n in range(2000)]
    assert draws == [draw_budget(settings, 1000, 0, 0, n) for n in range(2000)]
    assert draws != [draw_budget(settings, 1000, 0, 1, n) for n in range(2000)]
    budgets = [d[1] for d in draws if d is not None]
    assert 0.77 < len(budgets) / 2000 < 0.83
    assert 0.21 < budgets.count(0) / len(budgets) < 0.29
    assert {b for b in budgets if b} <= set(range(50, 301)) and min(b for b in budgets if b) < 60 < 290 < max(budgets)
    assert draw_budget(EvictionSettings(), 1000, 0) is None
    assert all(d is None or d[1] <= 80 for d in (draw_budget(settings, 80, n) for n in range(200)))
