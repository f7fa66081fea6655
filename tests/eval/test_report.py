import json
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import pytest

from a2t.data.manifest import Row, Turn, Word
from a2t.eval.embedded import Rate, figures, results
from a2t.eval.report import bars, wilson, write_report
from a2t.eval.streaming import SessionRun

GOOD = {
    "wer": 0.08, "wer_unbounded": 0.07, "wer_floor": 0.1, "peak_residents": 4098, "peak_residents_unbounded": 9001,
    "recall": 0.72, "recall_base": 0.8, "recall_unbounded": 0.7, "recall_streaming_llm": 0.36,
    "wer_first_minute": 0.05, "wer_last_minute": 0.07, "order_qa": 0.5, "order_qa_native": 0.5,
    "takeover_pause": 0.1, "takeover_backchannel": 0.05, "takeover_turn_end": 0.9,
    "takeover_pause_base": 0.05, "takeover_backchannel_base": 0.0, "takeover_turn_end_base": 0.95,
    "takeover_pause_no_distillation": 1.0, "takeover_backchannel_no_distillation": 1.0,
    "takeover_turn_end_no_distillation": 1.0, "emission_delay_mean_s": 1.2, "emission_delay_max_s": 4.99,
    "unit_ms_mean": 30.0, "unit_ms_p99": 90.0, "units": 10_039, "deadline_misses": 0,
}  # fmt: skip


def test_all_bars_at_their_border() -> None:
    assert len(bars(GOOD, 98)) == 14
    assert all(b.met for b in bars(GOOD, 98))


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"wer": 0.0801, "wer_unbounded": 0.08}, "WER, B = 4,000"),
        ({"wer_unbounded": 0.0699}, "WER, B = 4,000 against unbounded"),
        ({"wer_last_minute": 0.0701}, "WER, tenth minute against first"),
        ({"peak_residents": 4099}, "peak residents, B = 4,000"),
        ({"peak_residents_unbounded": 9000}, "peak residents, unbounded"),
        ({"recall_streaming_llm": 0.361}, "recall beyond 3 minutes, StreamingLLM"),
        ({"takeover_pause": 0.101}, "takeover in pauses"),
        ({"takeover_backchannel": 0.051}, "takeover on back-channels"),
        ({"takeover_turn_end": 0.899}, "takeover at turn ends"),
        ({"emission_delay_mean_s": 1.21}, "word emission delay, mean"),
        ({"emission_delay_max_s": 5.0}, "word emission delay, max"),
        ({"deadline_misses": 1}, "units over 1 s"),
        ({"units": 10_038}, "units over 1 s"),
    ],
)
def test_each_bar_can_be_missed(changes: dict[str, float], missed: str) -> None:
    assert [b.figure for b in bars(GOOD | changes, 98) if not b.met] == [missed]


def test_recall_bars_and_missing_figures() -> None:
    verdicts = {b.figure: b.verdict for b in bars(GOOD | {"recall": 0.719, "recall_base": 0.799, "wer": None}, 98)}
    assert verdicts["recall beyond 3 minutes, native base"] == "**MISSED**"
    assert verdicts["recall beyond 3 minutes, B = 4,000"] == "**MISSED**"  # 0.9 * 0.799 = 0.7191
    assert verdicts["WER, B = 4,000"] == verdicts["WER, B = 4,000 against unbounded"] == "not run"


def test_wilson_interval() -> None:
    low, high = wilson(Rate(8, 10))  # Wilson (1927) by hand: (0.8 + 0.1921 +- 1.96 * sqrt(0.016 + 0.0096)) / 1.3842
    assert (low, high) == (pytest.approx(0.4902, abs=2e-4), pytest.approx(0.9433, abs=2e-4))
    assert wilson(Rate(0, 5))[0] == 0.0 and wilson(Rate(5, 5))[1] == 1.0


def test_files(tmp_path: Path, make_row: Callable[..., Row], make_run: Callable[..., SessionRun]) -> None:
    turns = [
        Turn("fact", 1.0, 2.0, "the key is in the hall", None, {"key": ["key"], "value": "hall"}),
        Turn(
            "question", 200.0, 201.4, "where is the key", "in the hall", {"key": ["key"], "value": "hall", "source": 0}
        ),
    ]
    row = make_row(210.0, turns, [Word("the", 1.0, 1.5), Word("where", 200.0, 200.4)])
    runs = {name: make_run(210, {202: "in the hall."}, {1: "the"}, system=name) for name in ("a2t", "unbounded")}
    found = {name: figures([(row, run)]) for name, run in runs.items()}
    out = results(found)
    text = write_report(tmp_path, out, found, "One conversation.", (runs["a2t"], runs["unbounded"]))
    assert json.loads((tmp_path / "results.json").read_text()) == out
    assert (tmp_path / "report.md").read_text() == text
    assert "| WER, B = 4,000 | 50.00% | at most 8 % | **MISSED** |" in text and "not run" in text
    assert "a2t: student, B = 4,000" in text and "nfkc-lower" in text
    assert json.loads((tmp_path / "details.json").read_text())["a2t"]["recall"] == {"hits": 1, "of": 1}
    for name in ("residency", "wer_by_minute", "recall"):
        image = matplotlib.image.imread(tmp_path / f"{name}.png")
        assert image.ndim == 3 and image.std() > 0.01, name
