"""The benchmark at tiny sizes: both sides feed the same, the budget holds, paper is what is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from a2t.eval import benchmark
from jobs.benchmark import main


def test_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiny", "--seconds", "30", "--budget", "300", "--most", "2", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "measures no model" in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    plain, one, many = results["runs"]
    assert plain["unit_ms"]["units"] == one["unit_ms"]["units"] == 30
    assert many["unit_ms"]["units"] == 30 * many["conversations"]
    for run in results["runs"]:
        assert run["kv_bytes"] == run["kv_bytes_on_paper"]
    # 32 of the prompt, ten units that write (18), two that listen (13), eight that answer; then ten again
    units = [benchmark.script(benchmark.SpecialTokens(*range(11)), n) for n in range(30)]
    fed = sum(12 + len(s.native) + (0 if s.segment is None else len(s.segment) + 2) for s in units)
    assert plain["residents_end"] == 32 + fed
    assert one["residents_end"] < plain["residents_end"]
    assert one["residents_end"] <= 300


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "there is no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("most", "limit"), [(1, 1), (8, 8), (8, 5), (100, 37), (3, 0)])
def test_the_largest_batch(most: int, limit: int) -> None:
    tried: list[int] = []

    def fits(n: int) -> bool:
        tried.append(n)
        return n <= limit

    assert benchmark.largest(fits, most) == max(1, min(most, limit))
    assert len(tried) <= 14 and max(tried, default=0) <= most
