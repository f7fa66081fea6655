"""The definitions against the world itself: what its time line says the assistant should do must score perfectly, and
spoiling it in one respect must spoil that figure alone."""

from dataclasses import replace
from random import Random

import pytest

from a2t.data.conversation import converse, imagined_speech
from a2t.data.embedded_corpus import TEN_MINUTES
from a2t.data.manifest import Row
from a2t.eval.embedded import RECALL_SECONDS, Figures, Rate, figures, unit_of
from a2t.eval.streaming import SessionRun, UnitRun

CONTROL = ("<|listen|>", "<|speak|>", "<|turn_eos|>", "<|chunk_eos|>")


def gold(seed: int) -> tuple[Row, SessionRun]:
    """A ten-minute script and the stream that follows it: native tokens, each word written half a second late."""
    rng = Random(seed)
    row = converse(rng, imagined_speech(rng), TEN_MINUTES, True).row("s", "s.wav", "v", "test")
    assert row.native is not None
    wrote: list[list[str]] = [[] for _ in row.native]
    for word in row.words:
        wrote[min(len(wrote) - 1, unit_of(word.end + 0.5))].append(word.word)
    units = [
        UnitRun(
            listening=native == ("<|listen|>",),
            end_of_turn="<|turn_eos|>" in native,
            response=" ".join(str(t) for t in native if t not in CONTROL),
            transcript=" ".join(wrote[u]),
            unit_ms=20.0,
            positions=13,
            evicted=0,
            residents={},
        )
        for u, native in enumerate(row.native)
    ]
    asked = {i: t.answer or "" for i, t in enumerate(row.turns) if t.kind == "order_question"}
    return row, SessionRun("s", "a2t", "", 4000, units, asked)


@pytest.fixture(scope="module")
def sessions() -> list[tuple[Row, SessionRun]]:
    return [gold(seed) for seed in range(4)]


def perfect(rate: Rate, at_least: int) -> bool:
    return rate.of >= at_least and rate.hits == rate.of


def test_the_script_itself_is_perfect(sessions: list[tuple[Row, SessionRun]]) -> None:
    found: Figures = figures(sessions)
    turns = found.turns
    assert perfect(found.recall, 20) and all(r.right for r in found.recalled)
    assert min(r.distance for r in found.recalled) < RECALL_SECONDS < max(r.distance for r in found.recalled)
    assert perfect(found.order_live, 4) and perfect(found.order_text, 4)
    assert perfect(turns.turn_end, 100) and perfect(turns.stopped, 5)
    for rate in (turns.pause, turns.backchannel, turns.statement):
        assert rate.hits == 0 and rate.of > 40
    assert found.transcript is not None
    assert found.transcript.errors.errors == 0
    assert len(found.transcript.by_minute) == 10 and all(m.hits == 0 for m in found.transcript.by_minute)
    assert min(found.transcript.delays) >= 0.5 and max(found.transcript.delays) <= 1.6


def test_speaking_up_in_every_listening_unit_takes_every_pause(sessions: list[tuple[Row, SessionRun]]) -> None:
    eager = [
        (
            row,
            replace(
                run,
                units=[
                    replace(u, listening=False, end_of_turn=True, response="yes") if u.listening else u
                    for u in run.units
                ],
            ),
        )
        for row, run in sessions
    ]
    turns = figures(eager, side_channel=False).turns
    assert perfect(turns.pause, 40) and turns.statement.hits > 0.9 * turns.statement.of


def test_silence_takes_no_turn_and_recalls_nothing(sessions: list[tuple[Row, SessionRun]]) -> None:
    mute = [
        (
            row,
            replace(
                run,
                units=[replace(u, listening=True, end_of_turn=False, response="") for u in run.units],
                text_answers={},
            ),
        )
        for row, run in sessions
    ]
    found = figures(mute, side_channel=False)
    assert found.turns.turn_end.value == found.recall.value == found.order_live.value == 0.0
    assert found.order_text == Rate() and found.turns.stopped == Rate()


def test_answers_one_unit_late_count_and_four_units_late_do_not(sessions: list[tuple[Row, SessionRun]]) -> None:
    def late(by: int) -> Rate:
        moved = [(row, replace(run, units=[run.units[0]] * by + run.units[:-by])) for row, run in sessions]
        return figures(moved, side_channel=False).turns.turn_end

    assert late(1).value == 1.0
    few = late(4).value  # some land, by chance, where the next question ends
    assert few is not None and few < 0.4
