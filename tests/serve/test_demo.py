"""The demonstration's own parts: scoring what came over the wire, its files, and what a user may get wrong."""

from __future__ import annotations

import io
import json
import math
import socket
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import soundfile
from rich.console import Console

from a2t.data.conversation import Plan, converse, imagined_speech
from a2t.data.manifest import Row
from jobs.demo.__main__ import capacity, main
from jobs.demo.call import Talk
from jobs.demo.endpoint import free_port
from jobs.demo.report import Screen, report, session_run

BUDGET = 300


@pytest.fixture(scope="module")
def row() -> Row:
    rng = Random(3)
    session = converse(rng, imagined_speech(rng), Plan(240, 6, 3), held_out=True)
    return session.row("s", "s.wav", "nobody", "test")


def perfect(row: Row) -> Talk:
    """What a model would send that hears every word half a second late and answers as the script says."""
    talk = Talk("sess_1", seconds=4.0)
    words: dict[int, list[str]] = {}
    for w in row.words:
        words.setdefault(min(row.units() - 1, math.ceil(w.end + 0.5) - 1), []).append(w.word)
    held = 0
    assert row.native is not None
    for unit, native in enumerate(row.native):
        said = [str(t) for t in native if not str(t).startswith("<")]
        evicted = max(0, held + 20 - BUDGET)
        held += 20 - evicted
        talk.units.append(
            {
                "unit": unit, "listening": native[-1] == "<|listen|>", "end_of_turn": "<|turn_eos|>" in native,
                "response": " ".join(said), "transcript": " ".join(words.get(unit, [])), "unit_ms": 50.0 + unit % 2,
                "positions": 20, "evicted": evicted, "peak": held + evicted,
                "residents": {"prefix": 4, "audio": held - 4},
                "segment_closed_by": "model", "forwards": 4, "encoder_bytes": 10, "kv_bytes": 100, "missed": False,
            }
        )  # fmt: skip
        if said:
            talk.speech[unit] = np.full(12_000, 0.5, np.float32)
    return talk


def test_a_perfect_conversation_scores_perfectly(row: Row, tmp_path: Path) -> None:
    shown = io.StringIO()
    pcm_S = np.zeros(row.units() * 16_000, np.float32)
    out = report(Console(file=shown, width=100), tmp_path, BUDGET, row, pcm_S, perfect(row), perfect(row))
    scores = out["with_eviction"]
    assert scores["wer"] == 0
    assert scores["recall_asked"] >= 3
    assert scores["recall_right"] == scores["recall_asked"]
    assert (scores["peak_residents"], scores["final_residents"]) == (BUDGET + 20, BUDGET)
    assert (scores["unit_ms_mean"], scores["deadline_misses"]) == (pytest.approx(50.5, abs=0.1), 0)
    assert 0.5 <= scores["emission_delay_mean_s"] <= 1.6
    assert json.loads((tmp_path / "results.json").read_text()) == out
    assert (tmp_path / "residency.png").read_bytes().startswith(b"\x89PNG")
    assert f"{scores['recall_right']} of {scores['recall_asked']}" in shown.getvalue()
    assert f"budget {BUDGET}" in shown.getvalue()
    heard, rate = soundfile.read(tmp_path / "conversation.flac")
    first = min(perfect(row).speech)
    assert (rate, heard.shape[1]) == (16_000, 2)
    assert np.abs(heard[: (first + 1) * 16_000, 1]).max() == 0  # nothing is said before its unit is over
    assert np.abs(heard[(first + 1) * 16_000 + 100 :][:7_000, 1]).min() > 0.4


def test_a_deaf_and_mute_one_scores_nothing(row: Row, tmp_path: Path) -> None:
    talk = perfect(row)
    for unit in talk.units:
        unit |= {"transcript": "", "response": "", "listening": True, "end_of_turn": False}
    pcm_S = np.zeros(row.units() * 16_000, np.float32)
    out = report(Console(file=io.StringIO()), tmp_path, BUDGET, row, pcm_S, talk, perfect(row))
    assert (out["with_eviction"]["wer"], out["with_eviction"]["recall_right"]) == (1.0, 0)
    assert out["with_eviction"]["emission_delay_mean_s"] is None
    assert out["without_eviction"]["wer"] == 0


def test_the_screen_shows_who_says_what(row: Row) -> None:
    shown = io.StringIO()
    talk = perfect(row)
    screen = Screen(Console(file=shown, width=1000), row.duration, BUDGET)
    for event in talk.units:
        screen.show(event)
    screen.finish()
    text = " ".join(line.split("  ", 1)[-1].strip() for line in shown.getvalue().splitlines() if "hears" in line)
    heard = " ".join(w for w in text.split() if w != "hears")
    assert heard == " ".join(w.word for w in row.words)
    assert f"residents of {BUDGET}" in shown.getvalue()
    assert len(session_run(row, talk, "a2t").units) == row.units()


def test_room_for_a_conversation_without_eviction() -> None:
    assert 600 * 19 < capacity(10) < 20_000


@pytest.mark.parametrize("wrong", [["--budget", "-1"], ["--minutes", "0"], ["--minutes", "nan"], ["--budget", "many"]])
def test_wrong_options_are_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(wrong)
    assert left.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_missing_weights_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    monkeypatch.setattr("a2t.models.tiny.EMBEDDED", tmp_path)
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert f"demo: {tmp_path} holds no weights" in capsys.readouterr().err


def test_a_taken_port_is_refused_and_avoided() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken = s.getsockname()[1]
        with pytest.raises(OSError, match=f"port {taken}"):
            free_port(taken)
    assert free_port(None) > 0
