"""The whole job on a random model and one rendered session of seconds: files, resuming, and what a user is told."""

import json
from pathlib import Path

import pytest

from a2t.data import embedded_corpus, world
from a2t.data.conversation import Plan
from a2t.data.synthesis import Part, write_corpus
from a2t.models.tiny import TinyConfig, TinyModules, WordTokenizer, save_modules
from jobs import evaluate


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


def short_test_set(folder: Path, sessions: int, seed: int) -> Path:
    return write_corpus(folder, [Part("ten", Plan(8, 1), sessions=sessions, vary=False)], seed, "test", shards=1)


def test_the_job_end_to_end_and_again(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded_corpus, "held_out", short_test_set)
    argv = [
        "--sessions",
        "1",
        "--systems",
        "base,streaming_llm",
        "--workers",
        "1",
        "--base",
        str(base),
        "--out",
        str(tmp_path),
    ]
    assert evaluate.main(argv) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["wer"] is None and results["takeover_turn_end_base"] is not None
    said = capsys.readouterr().out
    assert "0 of 2 raw results are there" in said and "split `test`" in said
    assert (tmp_path / "recall.png").exists()
    raw = sorted((tmp_path / "raw" / "seed0").glob("*.json"))
    assert len(raw) == 2
    before = [p.stat().st_mtime_ns for p in raw]
    assert evaluate.main(argv) == 0
    assert "2 of 2 raw results are there" in capsys.readouterr().out
    assert [p.stat().st_mtime_ns for p in raw] == before


def test_what_a_user_is_told(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--base", str(base), "--adapter", str(tmp_path), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "holds no .safetensors" in error and "--systems" in error and "Traceback" not in error
    with pytest.raises(SystemExit):
        evaluate.main(["--systems", "base,bass"])
    assert "no system bass" in capsys.readouterr().err
