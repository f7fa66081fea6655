"""The two training jobs on Ray Train: what they write is what the library alone computes; they go on, they refuse."""

import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from a2t.audio.files import write_wav
from a2t.data.manifest import Manifest, Row, Word
from a2t.distill.config import PRESETS, with_overrides
from a2t.distill.corpus import Joined
from a2t.distill.recorded import open_recorded
from a2t.distill.teacher import TeacherStore, model_hash, teach
from a2t.distill.train import distill
from a2t.duplex.protocol import SpecialTokens
from a2t.models.tiny import load_modules, random_tiny, save_modules
from jobs import _training, compare_scopes, precompute_teacher
from jobs import distill as distill_job

SETTINGS = {"join_units": 5, "epochs": 2, "step_units": 3, "lora": {"rank": 2}, "autocast": None}
SET = [f"--set={x}" for x in ("join_units=5", "epochs=2", "step_units=3", "lora.rank=2", "autocast=null")]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model folder and a corpus of six short utterances."""
    folder = tmp_path_factory.mktemp("world")
    model = random_tiny(3)
    save_modules(model.modules, model.tokenizer, folder / "model", {"made_by": "a test"})
    rng = np.random.default_rng(0)
    rows = []
    for n in range(6):
        write_wav(folder / f"{n}.wav", 0.1 * rng.standard_normal(16000 + 4000 * n))
        words = [Word(f"w{i + n}", t, t + 0.2) for i, t in enumerate((0.1, 0.4, 0.7))]
        rows.append(Row(f"r{n}", f"{n}.wav", 1 + 0.25 * n, "s", "train", tuple(words)))
    Manifest.write(folder / "manifest.jsonl", rows)
    return folder


def precompute_options(world, out, workers):
    options = ["--model", str(world / "model"), "--manifest", str(world / "manifest.jsonl"), "--out", str(out)]
    options += ["--preset", "embedded", "--workers", str(workers), *SET]
    return [*options, "--part-rows", "1", "--shard-examples", "1"]


@pytest.fixture(scope="module")
def data(world, tmp_path_factory, ray_cluster):
    """What the teacher's job leaves after two kills: of its driver, and of one of its workers when it went on."""
    out = tmp_path_factory.mktemp("data")
    command = [sys.executable, "-m", "jobs.precompute_teacher", *precompute_options(world, out, 0)]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: whole_files(out) or job.poll() is not None)
    job.kill()
    assert job.wait() == -signal.SIGKILL, "killed before it was through"
    of_the_driver = stamps(out)

    def new_ones():
        return stamps(out) if len(stamps(out)) > len(of_the_driver) else None

    killed = kill_a_worker(new_ones)
    assert precompute_teacher.main(precompute_options(world, out, 2)) == 0
    [of_the_workers] = killed()
    assert of_the_workers.items() >= of_the_driver.items(), "the workers began with what was there"
    assert stamps(out).items() >= of_the_workers.items(), "what was there was made again"
    return out


def stamps(out):
    return {path: path.stat().st_mtime_ns for path in whole_files(out)}


def whole_files(out):
    """Everything of the parts and shards that are finished."""
    parts = [p.parent for p in out.glob("corpus/part-*/corpus.json") if p.parent.suffix != ".part"]
    shards = [s for side in out.glob("teacher/shard-*.json") for s in (side, side.with_suffix(".safetensors"))]
    return [p for part in parts for p in part.iterdir()] + shards


def wait_for(condition, seconds=240):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def workers_below():
    """Ray Train's worker processes of this test run."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if "RayTrainWorker" in _title(p)]


def _title(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def kill_a_worker(when):
    """Kills one of Ray Train's workers as soon as `when()` holds. Returns what waits for that and tells what it was."""
    seen = []

    def kill():
        found = wait_for(when)
        workers_below()[-1].kill()
        seen.append(found)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()

    def killed():
        thread.join()
        return seen

    return killed


def test_a_killed_teacher_goes_on_and_nothing_is_missing_or_doubled(world, data):
    manifest = json.loads((data / "teacher" / "manifest.json").read_text())
    corpus = Joined(open_recorded(data / "corpus"), with_overrides(PRESETS["embedded"], SETTINGS))
    sides = [json.loads(p.read_text()) for p in sorted(data.glob("teacher/shard-*.json"))]
    assert [i for side in sides for i in side["ids"]] == corpus.ids
    assert manifest["examples"] == len(corpus) and len(manifest["shards"]) == len(sides) == len(corpus)
    assert manifest["code_version"] and manifest["model"] == "a2t-embedded"
    modules, tokenizer = load_modules(world / "model")
    tokens = SpecialTokens.from_lookup(tokenizer.token_id)
    store = TeacherStore(data / "teacher", model_hash(modules.llm, tokens))
    store.verify()
    for n in range(len(corpus)):
        [taught] = teach(modules.llm, tokens, [corpus[n]])
        assert torch.equal(store.hidden(corpus[n]), taught.hidden_ED)


def test_a_killed_worker_changes_neither_the_curve_nor_the_adapter(world, data, tmp_path, ray_cluster, capfd):
    out = tmp_path / "run"
    train = ["--model", str(world / "model"), "--data", str(data), "--out", str(out), "--preset", "embedded", *SET]
    train += ["--workers", "1:2", "--checkpoint-seconds", "0", "--validate", str(world / "manifest.jsonl")]
    log = out / "log.jsonl"
    killed = kill_a_worker(lambda: log.is_file() and len(log.read_text().splitlines()) >= 3)
    assert distill_job.main([*train, "--validate-rows", "2"]) == 0
    assert killed() == [True]
    printed = capfd.readouterr().out
    assert "tensorboard --logdir" in printed and "goes on where this one stopped" in printed
    modules, tokenizer = load_modules(world / "model")
    settings = with_overrides(PRESETS["embedded"], SETTINGS)
    tokens = SpecialTokens.from_lookup(tokenizer.token_id)
    corpus, store = open_recorded(data / "corpus"), data / "teacher"
    distill(modules.llm, tokens, corpus, tmp_path / "alone", settings, teacher=store)
    alone = tmp_path / "alone"
    a, b = (load_file(f / "adapter" / "adapter_model.safetensors") for f in (out, alone))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-4)  # float32, summed in another order
    base, _ = load_modules(world / "model")
    PeftModel.from_pretrained(base.llm, str(out / "adapter"))
    logs = [[json.loads(x) for x in (f / "log.jsonl").read_text().splitlines()] for f in (out, alone)]
    assert [x["step"] for x in logs[0]] == [x["step"] for x in logs[1]] == list(range(1, len(logs[0]) + 1))
    assert [x["loss"] for x in logs[0]] == pytest.approx([x["loss"] for x in logs[1]], rel=1e-4)
    assert list((out / "tensorboard").iterdir())
    epochs = [json.loads(x) for x in (out / "validation.jsonl").read_text().splitlines()]
    assert [x["epoch"] for x in epochs] == list(range(settings.epochs)) and all("wer" in x for x in epochs)
    best = json.loads((out / "best" / "validation.json").read_text())
    assert best["score"] == min(x["score"] for x in epochs)


def test_where_the_adapter_acts_is_compared_and_not_measured_twice(world, data, tmp_path, capsys):
    manifest, out = str(world / "manifest.jsonl"), tmp_path / "compared"
    options = ["--model", str(world / "model"), "--data", str(data), "--validate", manifest, "--validate-rows", "2"]
    options += ["--preset", "embedded", "--workers", "0", *SET, "--out", str(out)]
    assert compare_scopes.main([*options, "--variants", "segment_hidden"]) == 0
    made = (out / "segment_hidden" / "log.jsonl").stat().st_mtime_ns
    assert compare_scopes.main([*options, "--variants", "segment_hidden,no_distillation"]) == 0
    assert (out / "segment_hidden" / "log.jsonl").stat().st_mtime_ns == made, "what was there was made again"
    results = json.loads((out / "results.json").read_text())
    assert list(results) == ["base", "segment_hidden", "no_distillation"]
    assert "wer" not in results["base"] and "kl" not in results["base"]
    for name, weight in (("segment_hidden", 1), ("no_distillation", 0)):
        assert results[name]["wer"] > 0 and results[name]["kl"] > 0
        assert results[name]["under"]["settings"]["weights"]["kl"] == weight
    assert (out / "comparison.md").read_text() in capsys.readouterr().out


def test_bad_options_end_with_a_message(world, tmp_path, capsys):
    yaml = tmp_path / "job.yaml"
    yaml.write_text("epoch: 3\n")
    for main, argv, message in [
        (precompute_teacher.main, ["--out", "x"], "the job needs --manifest"),
        (precompute_teacher.main, ["--out", "x", "--manifest", "none.jsonl"], "none.jsonl: there is no such manifest"),
        (distill_job.main, ["--out", "x", "--data", str(tmp_path)], "run jobs.precompute_teacher first"),
        (distill_job.main, ["--set", "epoch=3"], "no setting 'epoch'"),
        (distill_job.main, ["--set", "epochs"], "NAME=VALUE is needed"),
        (distill_job.main, ["--config", str(yaml)], "there is no option 'epoch'"),
        (distill_job.main, ["--workers", "2:1", "--out", "x", "--data", "y"], "nor MIN:MAX"),
        (distill_job.main, ["--workers", "0", "--zero", "3", "--out", "x", "--data", "y"], "--workers of at least 1"),
        (distill_job.main, ["--out", "x", "--data", "nowhere://y"], "nowhere://y cannot be opened"),
    ]:
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_what_is_refused_is_refused_once(tmp_path):
    begun = []

    def work(job):
        begun.append(job)
        raise ValueError("no such word")

    note = tmp_path / "ray" / "refused"
    begin = _training._once_refused(work, str(note))
    with pytest.raises(ValueError, match="no such word"):
        begin({})
    begin({})  # Ray Train's next try
    assert begun == [{}] and note.read_text() == "no such word"


@pytest.mark.parametrize("main", [precompute_teacher.main, distill_job.main])
def test_help(main, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0 and "--set NAME=VALUE" in capsys.readouterr().out


def test_yaml_gives_defaults_and_the_command_line_wins(tmp_path):
    import argparse

    from jobs._training import add_arguments, config_of, parse, plain

    yaml = tmp_path / "job.yaml"
    options = "out: there\nworkers: '3:4'\npreset: paper\n"  # without the quotes YAML reads a number of minutes
    yaml.write_text(options + "settings:\n  epochs: 5\n  eviction: {high: 100, low: 7}\n")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parse(parser, ["--config", str(yaml), "--threads", "2", "--set", "eviction.high=200"], ["out"])
    assert (args.out, args.workers.asked) == ("there", (3, 4))
    assert (args.settings.epochs, args.settings.learning_rate) == (5, 1e-4)
    assert (args.settings.eviction.high, args.settings.eviction.low) == (200, 7)
    assert config_of(json.loads(json.dumps(plain(args)))["settings"]) == args.settings
