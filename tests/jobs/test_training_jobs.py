"""The two training jobs on Ray Train: what they write is what the library alone computes; they go on, they refuse."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from a2t.audio.files import write_wav
from a2t.data.manifest import Manifest, Row, Word
from a2t.distill.config import PRESETS, with_overrides
from a2t.distill.recorded import open_recorded
from a2t.distill.train import distill
from a2t.duplex.protocol import SpecialTokens
from a2t.models.tiny import load_modules, random_tiny, save_modules
from jobs import distill as distill_job
from jobs import precompute_teacher

SETTINGS = {"join_units": 5, "epochs": 1, "step_units": 6, "lora": {"rank": 2}}
SET = ["--set", "join_units=5", "--set", "epochs=1", "--set", "step_units=6", "--set", "lora.rank=2"]


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


def test_the_two_jobs_end_to_end(world, tmp_path, ray_cluster, capfd):
    data, out = tmp_path / "data", tmp_path / "run"
    precompute = ["--model", str(world / "model"), "--manifest", str(world / "manifest.jsonl"), "--out", str(data)]
    precompute += ["--preset", "embedded", "--workers", "0", "--part-rows", "4", "--shard-examples", "2", *SET]
    assert precompute_teacher.main(precompute) == 0
    printed = capfd.readouterr().out
    assert "corpus: 6 utterances" in printed and "bytes an event" in printed
    assert json.loads((data / "teacher" / "manifest.json").read_text())["examples"] >= 2

    train = ["--model", str(world / "model"), "--data", str(data), "--out", str(out), "--preset", "embedded", *SET]
    assert distill_job.main([*train, "--workers", "2"]) == 0
    modules, tokenizer = load_modules(world / "model")
    alone = distill(
        modules.llm,
        SpecialTokens.from_lookup(tokenizer.token_id),
        open_recorded(data / "corpus"),
        tmp_path / "alone",
        with_overrides(PRESETS["embedded"], SETTINGS),
        teacher=data / "teacher",
    )
    a, b = (load_file(f / "adapter_model.safetensors") for f in (out / "adapter", alone))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-4)  # float32, summed in another order
    base, _ = load_modules(world / "model")
    PeftModel.from_pretrained(base.llm, str(out / "adapter"))
    logs = [[json.loads(x) for x in (f / "log.jsonl").read_text().splitlines()] for f in (out, tmp_path / "alone")]
    assert [x["step"] for x in logs[0]] == [x["step"] for x in logs[1]]
    assert [x["loss"] for x in logs[0]] == pytest.approx([x["loss"] for x in logs[1]], rel=1e-4)
    assert list((out / "tensorboard").iterdir())


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
        (distill_job.main, ["--workers", "-1", "--out", "x", "--data", "y"], "at least 0"),
    ]:
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("main", [precompute_teacher.main, distill_job.main])
def test_help(main, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0 and "--set NAME=VALUE" in capsys.readouterr().out


def test_yaml_gives_defaults_and_the_command_line_wins(tmp_path):
    import argparse

    from jobs._training import add_arguments, config_of, parse, plain

    yaml = tmp_path / "job.yaml"
    yaml.write_text("out: there\nworkers: 3\npreset: paper\nsettings:\n  epochs: 5\n  eviction: {high: 100, low: 7}\n")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parse(parser, ["--config", str(yaml), "--workers", "4", "--set", "eviction.high=200"], ["out"])
    assert (args.out, args.workers, args.settings.epochs, args.settings.learning_rate) == ("there", 4, 5, 1e-4)
    assert (args.settings.eviction.high, args.settings.eviction.low) == (200, 7)
    assert config_of(json.loads(json.dumps(plain(args)))["settings"]) == args.settings
