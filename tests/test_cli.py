"""`a2t stream` on a small random model: what it prints is what the engine did, and a mistake ends in a message."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from rich.console import Console

import a2t.stream
from a2t.audio.files import read_audio
from a2t.cli import main
from a2t.duplex.engine import ConversationConfig, Engine, EngineConfig
from a2t.kv.kinds import Kind
from a2t.live import Dialogue, LiveView, Totals, grouped
from a2t.models.tiny import load_tiny, random_tiny, save_modules


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny = random_tiny(3)
    save_modules(tiny.modules, tiny.tokenizer, folder, {})
    return str(folder)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> str:
    """3.5 s, stereo, 22,050 Hz, flac."""
    path = tmp_path_factory.mktemp("audio") / "talk.flac"
    soundfile.write(path, np.random.default_rng(0).uniform(-0.3, 0.3, (77_175, 2)), 22_050)
    return str(path)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs and checks the exit code; the units and the summary, without times."""
    assert main(["stream", *arguments, "--json", "--time-budget", "none"]) == 0
    *units, last = map(json.loads, capsys.readouterr().out.splitlines())
    for values in (*units, last["summary"]):
        for key in [k for k in values if k.startswith("unit_ms") or "deadline" in k]:
            assert values.pop(key) >= 0
    return units, last["summary"]


def test_units_are_what_the_engine_did(capsys: pytest.CaptureFixture[str], model: str, talk: str) -> None:
    units, summary = run_json(capsys, talk, "--model", model, "--tail", "2", "--budget", "60")
    assert units[:4] == run_json(capsys, talk, "--model", model, "--tail", "0", "--budget", "60")[0]
    assert summary["units"] == len(units)
    assert 4 < len(units) <= 4 + 2
    assert summary["complete"]

    engine = Engine(load_tiny(model), config=EngineConfig(side_channel_budget_s=None))
    conversation = engine.open(ConversationConfig(budget=60))
    pcm_S = read_audio(talk)
    assert len(pcm_S) == 56_000
    engine.push(conversation, np.pad(pcm_S, (0, 8_000)))
    for shown, (_, result, stats) in zip(units, engine.run(), strict=False):
        assert (shown["heard"], shown["said"]) == (result.transcript_text, result.response_text)
        assert shown["residents"] == {kind.name.lower(): n for kind, n in stats.residents.items()}
        assert shown["total"] == sum(shown["residents"].values())
        assert shown["evicted"] == stats.evicted
    assert engine.conversations
    assert conversation.units == 4


def test_the_budget_reaches_the_engine(capsys: pytest.CaptureFixture[str], model: str, talk: str) -> None:
    arguments = [talk, "--model", model, "--policy-option", "retention_units=1", "--tail", "0"]
    kept, summary = run_json(capsys, *arguments, "--budget", "none")
    assert [unit["residents"]["audio"] for unit in kept] == [10, 20, 30, 40]
    assert summary["evicted"] == 0
    floor, summary = run_json(capsys, *arguments, "--budget", "0")
    assert [unit["residents"]["audio"] for unit in floor] == [10, 10, 10, 10]
    assert summary["evicted"] >= 3 * 13
    recent = run_json(capsys, talk, "--model", model, "--tail", "0", "--policy", "streaming_llm", "--policy-option",
                      "recent=20")[1]  # fmt: skip
    assert recent["final_residents"] == 24


def test_sampling_follows_its_seed(capsys: pytest.CaptureFixture[str], model: str, talk: str) -> None:
    drawn = [
        run_json(capsys, talk, "--model", model, "--tail", "0", "--sampled", "--seed", seed)[0]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_text_output(capsys: pytest.CaptureFixture[str], model: str, talk: str) -> None:
    units, summary = run_json(capsys, talk, "--model", model, "--tail", "1")
    assert main(["stream", talk, "--model", model, "--tail", "1", "--time-budget", "none"]) == 0
    out = capsys.readouterr().out
    lines = [line.split(maxsplit=2) for line in out.splitlines() if line.startswith("0:00:")]
    for side, key in (("hears", "heard"), ("says", "said")):
        words = " ".join(unit[key] for unit in units).split()
        assert " ".join(text for _, speaker, text in lines if speaker == side).split() == words
    assert f"{summary['peak_residents']:,} of 4,000" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.wav"], "no such file"),
        (["empty.wav"], "is empty"),
        (["notes.txt"], "not an audio file"),
        (["{talk}", "--policy", "lru"], "no policy 'lru'"),
        (["{talk}", "--policy-option", "text_tier"], "write NAME=VALUE"),
        (["{talk}", "--policy-option", "colour=red"], "no option colour"),
        (["{talk}", "--policy-option", "text_tier=shrink"], "choose 'grow' or 'fold'"),
        (["{talk}", "--model", "nowhere"], "no such folder"),
        (["{talk}", "--model", "."], "has no config.json"),
        (["{talk}", "--model", "broken"], "broken/model.safetensors cannot be read"),
        (["{talk}", "--model", "{model}", "--adapter", "nowhere"], "no such folder"),
        (["{talk}", "--model", "{model}", "--prompt", "supercalifragilistic"], "supercalifragilistic"),
        (["{talk}", "--model", "{model}", "--seed", "1"], "add --sampled"),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: str,
    talk: str,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.wav").touch()
    Path("notes.txt").write_text("not audio\n" * 20)
    shutil.copytree(model, "broken")
    weights = Path("broken/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["stream", *(a.format(talk=talk, model=model) for a in arguments)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("a2t stream: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize(
    "arguments", [["--budget", "-1"], ["--budget", "lots"], ["--tail", "soon"], ["--time-budget", "-1"], ["--colour"]]
)
def test_arguments_that_are_none(capsys: pytest.CaptureFixture[str], talk: str, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["stream", talk, *arguments])
    assert stopped.value.code == 2
    assert "usage: a2t" in capsys.readouterr().err


def test_what_came_before_an_error_is_shown(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    samples = np.zeros(48_000)
    samples[40_000] = np.nan
    soundfile.write(tmp_path / "a.wav", samples, 16_000, subtype="FLOAT")
    assert main(["stream", str(tmp_path / "a.wav"), "--model", model, "--json"]) == 1
    printed = capsys.readouterr()
    *units, last = map(json.loads, printed.out.splitlines())
    assert len(units) == 2
    assert not last["summary"]["complete"]
    assert "the sample at 2.500 s is nan" in printed.err


def test_a_cache_that_is_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, talk: str
) -> None:
    monkeypatch.setattr(a2t.stream, "capacity_for", lambda config, seconds: 130)
    assert main(["stream", talk, "--model", model, "--policy", "unbounded"]) == 1
    printed = capsys.readouterr()
    assert "summary" in printed.out
    assert "capacity of 130" in printed.err


def test_an_interrupt_ends_with_the_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, talk: str
) -> None:
    whole = a2t.stream.units

    def interrupted(*arguments: Any) -> Any:
        yield next(whole(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(a2t.stream, "units", interrupted)
    assert main(["stream", talk, "--model", model]) == 130
    printed = capsys.readouterr()
    assert "0:00:01" in printed.out
    assert printed.err == "a2t stream: interrupted\n"


def test_help_needs_no_torch() -> None:
    code = "import sys, a2t.cli\ntry: a2t.cli.main(['stream', '--help'])\nfinally: print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    assert ran.stdout.splitlines()[-1] == "False"


def test_doctor(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    assert main(["doctor", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model_type"] == "a2t-embedded"
    assert main(["doctor", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("a2t doctor: ")


def test_minicpmo(capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint in the official layout through the same command."""
    folder = Path(__file__).parent / "data" / "minicpmo-duplex"
    arguments = [str(folder / "input.flac"), "--model", str(folder), "--tail", "0"]
    units, summary = run_json(capsys, *arguments)
    assert summary["units"] == len(units) == 40
    assert units[-1]["residents"]["audio"] == 400
    assert units[0]["residents"]["prefix"] == json.loads((folder / "expected.json").read_text())["system_len"]
    units, _ = run_json(capsys, *arguments, "--policy", "context", "--policy-option", "max_units=16")
    assert [unit["residents"]["audio"] for unit in units][14:18] == [150, 160, 160, 160]


def test_dialogue_joins_and_parts() -> None:
    dialogue = Dialogue(lambda ids: " ".join(f"w{i}" for i in ids))
    assert dialogue.add(0, [1, 2], [], False) == []
    assert dialogue.add(1, [3], [9], False) == []  # both at once
    assert [(line.speaker, line.unit, line.ids) for line in dialogue.add(2, [], [8], True)] == [
        ("hears", 0, [1, 2, 3]),
        ("says", 1, [9, 8]),
    ]
    assert dialogue.add(3, [4], [], False) == []
    assert [dialogue.text(line) for line in dialogue.finish()] == ["w4"]
    assert not dialogue.current


@pytest.mark.parametrize(("budget", "total"), [(4000, 1000), (500, 1000), (None, 1000), (0, 0)])
def test_the_view_shows_every_resident(budget: int | None, total: int) -> None:
    residents = dict.fromkeys(Kind, total // len(Kind))
    view = LiveView(Dialogue(lambda ids: ""), Totals(), budget, 600.0, grouped(residents))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view)
    text = console.export_text()
    assert f"{total:,} residents" in text
    assert text.count("█") - len(grouped(residents)) == (round(60 * total / max(budget or 0, total, 1)))
    assert ("over" in text) == (budget == 500)
    assert sum(grouped(residents).values()) == total
