"""The suites longspeech and full-duplex-bench as commands, on a random model."""

import json
from pathlib import Path

import numpy as np
import pytest

from a2t.audio.files import write_wav
from a2t.data import world
from a2t.eval import longspeech as suite
from a2t.models.tiny import TinyConfig, TinyModules, WordTokenizer, save_modules
from jobs import evaluate

BENCH = json.loads((Path(__file__).parents[1] / "data" / "full_duplex_bench.json").read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over the world's vocabulary."""
    from a2t.audio.conv_encoder import EncoderConfig

    folder = tmp_path_factory.mktemp("model")
    tokenizer = WordTokenizer.of_words(world.WORDS)
    encoder = EncoderConfig(hidden=64, blocks=1, layers=1, heads=2, feed_forward=64)
    config = TinyConfig(tokenizer.size, 64, 1, 4, 2, 16, 64, encoder=encoder)
    save_modules(TinyModules(config), tokenizer, folder, {"made": "at random"})
    return folder


def test_longspeech_on_the_generated_set_and_again(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--suite", "longspeech", "--sessions", "1", "--minutes", "0.1", "--systems", "base", "--workers", "0"]
    argv += ["--base", str(base), "--out", str(tmp_path)]
    assert evaluate.main(argv) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    (raw,) = (tmp_path / "raw").iterdir()
    run = suite.LongRun.read(raw)
    assert found["wer_native"] > 0 and found["peak_residents_native"] == run.peak
    asked = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {a["line"]: a["answer"] for a in asked} == run.answers
    said = capsys.readouterr().out
    assert "not LongSpeech itself" in said and "0 of 1 raw results are there" in said
    assert evaluate.main(argv) == 0
    assert "1 of 1 raw results are there" in capsys.readouterr().out
    verdicts = tmp_path / "verdicts.jsonl"
    verdicts.write_text("".join(json.dumps({"verdict": "YES", **a}) + "\n" for a in asked))
    assert evaluate.main([*argv, "--verdicts", str(verdicts)]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["temporal_qa_strict_native"] == 1.0
    assert (
        evaluate.main(["--suite", "longspeech", "--data", str(tmp_path), "--systems", "base", "--base", str(base)]) == 2
    )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three made-up samples a task in the published folders."""
    root = tmp_path_factory.mktemp("bench")
    rng = np.random.default_rng(0)
    tasks = {
        "synthetic_pause_handling": "pause_handling",
        "candor_turn_taking": "smooth_turn_taking",
        "synthetic_user_interruption": "user_interruption",
        "icc_backchannel": "backchannel",
    }
    for folder, task in tasks.items():
        for number in ("0", "1", "2"):
            sample = root / folder / number
            sample.mkdir(parents=True)
            for name, content in BENCH["samples"][task][number].items():
                (sample / name).write_text(json.dumps(content))
            write_wav(sample / "input.wav", 0.1 * rng.standard_normal(16000 * 3 + 500))
    (root / "icc_gt_distribution.json").write_text(json.dumps(BENCH["reference"]))
    return root


def test_full_duplex_bench_scores_what_a_recogniser_wrote(bench: Path, tmp_path: Path) -> None:
    argv = ["--suite", "full-duplex-bench", "--data", str(bench), "--out", str(tmp_path), "--score-only"]
    assert evaluate.main(argv) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    for folder, task in [("candor_turn_taking", "smooth_turn_taking"), ("icc_backchannel", "backchannel")]:
        expected = [BENCH["expected"][task]["per_sample"][n]["tor"] for n in ("0", "1", "2")]
        assert found[f"{folder}.as recognised"]["takeover"] == pytest.approx(np.mean(expected))
        assert found[f"{folder}.as recognised"]["samples"] == 3


def test_full_duplex_bench_streams_and_goes_on(
    base: Path, bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--suite", "full-duplex-bench", "--data", str(bench), "--out", str(tmp_path), "--systems", "base"]
    argv += ["--base", str(base), "--workers", "0", "--sessions", "1"]
    assert evaluate.main(argv) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found) == 4 and all(0 <= f["takeover"] <= 1 for f in found.values())
    assert len(list((tmp_path / "raw").rglob("output.json"))) == 4
    assert "not the benchmark's own figures" in (tmp_path / "report.md").read_text()
    capsys.readouterr()
    assert evaluate.main(argv) == 0
    assert "4 of 4 samples are there" in capsys.readouterr().out


def test_what_a_user_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in [
        (["--suite", "full-duplex-bench"], "needs --data"),
        (["--suite", "full-duplex-bench", "--data", str(tmp_path)], "holds none of candor_pause_handling"),
    ]:
        assert evaluate.main([*argv, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
