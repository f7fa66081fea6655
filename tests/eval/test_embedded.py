"""Every definition in a2t.eval.embedded on streams whose figures are counted by hand."""

from collections.abc import Callable

import pytest

from a2t.data.manifest import Row, Turn, Word
from a2t.eval.embedded import (
    Rate,
    figures,
    onsets,
    order_from_text,
    order_live,
    pauses,
    recall,
    results,
    transcription,
    turn_taking,
    unit_of,
)
from a2t.eval.streaming import SessionRun

RESULT_KEYS = """wer wer_unbounded wer_floor peak_residents peak_residents_unbounded recall recall_base recall_unbounded
recall_streaming_llm wer_first_minute wer_last_minute order_qa order_qa_native takeover_pause takeover_backchannel
takeover_turn_end takeover_pause_base takeover_backchannel_base takeover_turn_end_base takeover_pause_no_distillation
takeover_backchannel_no_distillation takeover_turn_end_no_distillation emission_delay_mean_s emission_delay_max_s
unit_ms_mean unit_ms_p99 units deadline_misses""".split()

MakeRow = Callable[..., Row]
MakeRun = Callable[..., SessionRun]


def fact(start: float, key: str, value: str) -> Turn:
    return Turn("fact", start, start + 2, f"the {key} is in the {value}", None, {"key": [key], "value": value})


def question(start: float, key: str, value: str, source: int | None) -> Turn:
    extra = {"key": [key], "value": value, "source": source}
    return Turn("question", start, start + 1.4, f"where is the {key}", f"in the {value}", extra)


def test_the_unit_of_a_moment() -> None:
    # unit 3 covers 3 to 4 s and decides at 4 s: what ends at exactly 4 s was heard by then
    assert [unit_of(t) for t in (0.0, 0.2, 3.01, 3.99, 4.0, 4.01)] == [0, 0, 3, 3, 3, 4]


def test_onsets(make_run: MakeRun) -> None:
    run = make_run(12, {1: "in the hall.", 3: "once there was", 4: "a dog", 5: ".", 6: "yes.", 7: "no.", 9: "-"})
    # 4 goes on, 5 only ends the turn, 7 follows an ended turn, 9 speaks without a word
    assert onsets(run.units) == [1, 3, 6, 7, 9]


def test_turn_ends(make_row: MakeRow, make_run: MakeRun) -> None:
    """Questions end at 2.4, 12.4, 22.4, 32.4: units 2, 12, 22, 32; answers in + 0, + 2, + 3 and one too early."""
    row = make_row(40.0, [question(10.0 * n + 1, "key", "hall", None) for n in range(4)])
    run = make_run(40, {2: "in the hall.", 14: "in the hall.", 25: "in the hall.", 31: "in the hall."})
    assert turn_taking(row, run).turn_end == Rate(2, 4)


def test_a_turn_that_is_already_open_is_no_answer(make_row: MakeRow, make_run: MakeRun) -> None:
    row = make_row(9.0, [question(3.0, "key", "hall", None)])
    assert turn_taking(row, make_run(9, dict.fromkeys(range(9), "bla"))).turn_end == Rate(0, 1)


def test_takeover_in_pauses(make_row: MakeRow, make_run: MakeRun) -> None:
    def sentence(*cuts: list[float]) -> Turn:
        return Turn("chat", 0.5, 30.0, "we saw a train", None, {"pauses": list(cuts)})

    row = make_row(32.0, [sentence([2.3, 3.6], [8.2, 8.9], [12.0, 12.6], [20.5, 21.5], [25.0, 26.0])])
    assert list(pauses(row)) == [(2.3, 3.6), (8.2, 8.9), (20.5, 21.5), (25.0, 26.0)]  # 0.6 s does not count
    # units that hear the pauses: 2-3, 8, 20-21, 25
    assert turn_taking(row, make_run(32, {3: "yes.", 9: "yes.", 20: "yes.", 21: "no.", 26: "yes."})).pause == Rate(2, 4)
    # a story under way is no onset
    assert turn_taking(row, make_run(32, dict.fromkeys(range(1, 31), "and"))).pause == Rate(0, 4)


def test_takeover_on_backchannels(make_row: MakeRow, make_run: MakeRun) -> None:
    row = make_row(30.0, [Turn("backchannel", t, t + 0.4, "yeah") for t in (2.1, 10.8, 20.3)])
    # units 2-4, 10-13 and 20-22
    run = make_run(30, {5: "what.", 13: "what.", 20: "what.", 21: "what."})
    assert turn_taking(row, run).backchannel == Rate(2, 3)


def test_a_rightful_answer_is_no_takeover(make_row: MakeRow, make_run: MakeRun) -> None:
    """ "mm-hmm" right after a question, and a pause just before its last word: the answer belongs to the question."""
    asked = Turn("question", 1.0, 5.6, "where is", "there", {"key": ["key"], "value": "hall", "pauses": [[4.1, 5.1]]})
    row = make_row(12.0, [asked, Turn("backchannel", 5.7, 6.0, "yeah"), Turn("chat", 2.0, 5.0, "i see")])
    taken = turn_taking(row, make_run(12, {5: "there."}))
    assert (taken.turn_end, taken.pause, taken.backchannel, taken.statement) == (
        Rate(1, 1),
        Rate(0, 1),
        Rate(0, 1),
        Rate(0, 1),
    )
    twice = turn_taking(row, make_run(12, {5: "there.", 7: "what."}))
    assert (twice.turn_end, twice.pause, twice.backchannel, twice.statement) == (
        Rate(1, 1),
        Rate(0, 1),
        Rate(1, 1),
        Rate(0, 1),
    )


def test_interruptions_and_statements(make_row: MakeRow, make_run: MakeRun) -> None:
    row = make_row(
        30.0, [Turn("interruption", t, t + 0.6, "stop") for t in (5.2, 15.2, 25.2)] + [fact(18.0, "key", "hall")]
    )
    story = dict.fromkeys((3, 4, 5, 6, *range(13, 20)), "and then")
    taken = turn_taking(row, make_run(30, story | {7: ".", 22: "so."}))
    assert taken.stopped == Rate(1, 2)  # the third met no open turn
    assert taken.statement == Rate(0, 1)
    assert turn_taking(row, make_run(30, {21: "so."})).statement == Rate(1, 1)


def test_recall(make_row: MakeRow, make_run: MakeRun) -> None:
    turns = [
        fact(1.0, "key", "hall"),  # ends at 3
        fact(10.0, "cup", "living room"),  # ends at 12
        question(182.9, "key", "hall", 0),  # 179.9 s later, ends at 184.3: units 184 to 187
        question(200.0, "cup", "living room", 1),  # 188 s later, units 201 to 204
        question(230.0, "key", "hall", 0),  # asked before
        question(240.0, "map", "car", None),  # from the prompt
    ]
    row = make_row(250.0, turns)
    right = make_run(250, {184: "in the", 185: "hall.", 201: "in the living", 202: "room."})
    assert [(round(r.distance, 3), r.right) for r in recall(row, right)] == [(179.9, True), (188.0, True)]
    wrong = make_run(250, {188: "in the hall.", 201: "in the room living."})
    assert [r.right for r in recall(row, wrong)] == [False, False]
    found = figures([(row, right), (row, wrong)])
    assert found.recall == Rate(1, 2)
    by_distance = {(a, b): rate for a, b, rate in found.recall_by_distance()}
    assert by_distance[120.0, 180.0] == Rate(1, 2) and by_distance[180.0, 240.0] == Rate(1, 2)
    assert sum(rate.of for rate in by_distance.values()) == 4


def test_order_questions(make_row: MakeRow, make_run: MakeRun) -> None:
    extra = {"key": ["home", "anna", "peter"], "value": "anna"}
    asked = [
        Turn("order_question", t, t + 2.2, "who came first peter or anna", "anna came first", extra)
        for t in (5.0, 15.0)
    ]
    row = make_row(25.0, asked)
    run = make_run(25, {7: "anna came first.", 17: "peter came before anna."}, text_answers={1: "well anna came first"})
    assert order_live(row, run) == Rate(1, 2)
    assert order_from_text(row, run) == Rate(1, 1)
    assert order_from_text(row, make_run(25, text_answers={0: "helen came first", 1: ""})) == Rate(0, 2)


def test_transcription_by_minute_and_delays(make_row: MakeRow, make_run: MakeRun) -> None:
    said = [("the", 0.5), ("key", 1.0), ("is", 59.0), ("there", 59.9), ("now", 61.0), ("yeah", 121.2)]
    row = make_row(122.0, [], [Word(w, e - 0.3, e) for w, e in said])
    # "is" is wrong, "now" is lost, "so" was never said; the third minute is 2 s long and belongs to the second
    wrote = {1: "the key", 30: "so", 60: "was there", 121: "yeah"}
    out = transcription([(row, make_run(122, {}, wrote, unit_ms=250.0))])
    assert (out.errors.substitutions, out.errors.deletions, out.errors.insertions, out.errors.words) == (1, 1, 1, 6)
    assert out.by_minute == [Rate(2, 4), Rate(1, 2)]
    assert out.delays == pytest.approx([2.25 - 0.5, 2.25 - 1.0, 61.25 - 59.9, 122.25 - 121.2])


def test_results_have_exactly_these_keys(make_row: MakeRow, make_run: MakeRun) -> None:
    turns = [fact(1.0, "key", "hall"), question(200.0, "key", "hall", 0), Turn("backchannel", 210.0, 210.5, "yeah")]
    row = make_row(220.0, turns, [Word("the", 1.0, 1.5)])
    right, wrong = {201: "in the hall."}, {201: "in the car.", 211: "what."}

    def of(responses: dict[int, str], peak: int, channel: bool = True, ms: float = 50.0) -> object:
        return figures([(row, make_run(220, responses, {1: "the"}, peak=peak, unit_ms=ms))], channel)

    found = {"a2t": of(right, 4007, ms=1001.0), "base": of(right, 2600, False), "streaming_llm": of(wrong, 2004, False)}
    out = results(found)  # type: ignore[arg-type]
    assert list(out) == RESULT_KEYS
    assert out["wer"] == 0.0 and out["wer_unbounded"] is None
    assert (out["peak_residents"], out["units"], out["deadline_misses"]) == (4007, 220, 220)
    assert (out["recall"], out["recall_base"], out["recall_streaming_llm"]) == (1.0, 1.0, 0.0)
    assert (out["takeover_backchannel"], out["takeover_turn_end_base"]) == (0.0, 1.0)
    assert out["takeover_pause"] is None  # no pause in the script
    assert out["takeover_pause_no_distillation"] is None  # not run
    assert out["emission_delay_mean_s"] == pytest.approx(2 + 1.001 - 1.5)
    assert out["unit_ms_mean"] == 1001.0


def test_nothing_to_score() -> None:
    with pytest.raises(ValueError, match="no session"):
        figures([])
