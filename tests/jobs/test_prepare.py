"""The job on Ray Data: a killed run goes on, nothing is missing, nothing is doubled; what a user is told."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import soundfile

from a2t.audio.files import read_audio
from a2t.data.manifest import Manifest
from jobs import prepare

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "librispeech"
PATIENCE = 480


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Twenty-four recordings of a folder of audio and text; two have no text."""
    folder = tmp_path_factory.mktemp("corpus")
    found = sorted((DATA / "corpus").rglob("*.flac"))
    for n in range(24):
        pcm_S = read_audio(found[n % len(found)])
        soundfile.write(folder / f"{n:02d}.wav", pcm_S, 16000)
        name = found[n % len(found)].stem
        texts = dict(
            line.split(" ", 1) for p in (DATA / "corpus").rglob("*.trans.txt") for line in p.read_text().splitlines()
        )
        if n not in (5, 11):
            (folder / f"{n:02d}.txt").write_text(texts[name])
    return folder


def test_killed_and_started_again(corpus, tmp_path, ray_cluster):
    """Killed with SIGKILL after its first parts, while others are being made."""
    address = ray_cluster.get_runtime_context().gcs_address
    out = tmp_path / "out"
    argv = ["--corpus", str(corpus), "--out", str(out), "--part", "1"]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", "jobs.prepare", *argv, "--workers", "1"],
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": address},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    until = time.monotonic() + PATIENCE
    try:
        while not (done := list(out.glob("parts/*.parquet"))):
            assert job.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.01)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert job.returncode == -signal.SIGKILL and not (out / "manifest.parquet").exists()
    made = {p: p.stat().st_mtime_ns for p in done}

    assert prepare.main(argv) == 0  # on the test's own connection
    report = json.loads((out / "report.json").read_text())
    rows = Manifest.read(out / "manifest.parquet")
    assert [r.id for r in rows] == [f"{n:02d}" for n in range(24) if n not in (5, 11)]
    assert report["findings"]["no text"]["examples"] == ["05", "11"]
    assert {p: p.stat().st_mtime_ns for p in made} == made
    assert len(list(out.glob("parts/*"))) == 24

    assert prepare.main([*argv[:3], str(tmp_path / "whole"), "--part", "24"]) == 0
    assert Manifest.read(tmp_path / "whole" / "manifest.parquet") == rows


def test_librispeech_and_again(tmp_path, ray_cluster, capsys):
    argv = ["--corpus", str(DATA / "corpus"), "--alignments", str(DATA / "textgrids"), "--out", str(tmp_path)]
    assert prepare.main(argv) == 0
    said = capsys.readouterr().out
    assert "3 utterances, 9 words" in said and "1 no alignment" in said and "19-198-0002" in said
    assert prepare.main(argv) == 0
    assert "1 parts, 1 of them there already" in capsys.readouterr().out


def test_what_a_user_is_told(tmp_path, capsys):
    for argv, message in [
        (["--corpus", str(tmp_path / "none"), "--out", str(tmp_path)], "there is no such folder; a URI"),
        (["--corpus", str(DATA / "textgrids"), "--out", str(tmp_path)], "holds no audio"),
        (
            ["--corpus", str(DATA / "corpus"), "--alignments", str(DATA / "corpus"), "--out", str(tmp_path)],
            "no TextGrid",
        ),
    ]:
        assert prepare.main(argv) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
    with pytest.raises(SystemExit):
        prepare.main(["--corpus", "x", "--out", "y", "--part", "0"])
    assert "at least 1" in capsys.readouterr().err
