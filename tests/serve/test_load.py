"""The load tool on an endpoint in this process: real clients, real sockets, its files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from jobs.load.__main__ import main
from tests.serve.endpoint import MODEL, endpoint


async def load(at: str, out: Path, *options: str) -> int:
    return await asyncio.to_thread(main, ["--address", at, "--name", MODEL, "--out", str(out), *options])


async def test_clients_in_real_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_S = (0.1 * np.random.default_rng(1).standard_normal(5 * 16_000)).astype(np.float32)
    monkeypatch.setattr("jobs.load.__main__.script", lambda *_: (None, noise_S))
    async with endpoint(rows=3) as at:
        assert (
            await load(at.address, tmp_path, "--clients", "3", "--minutes", "0.05", "--realtime", "--budget", "60") == 0
        )
        await at.empty()
    result = json.loads((tmp_path / "results.json").read_text())
    assert (result["units"], result["units_expected"], result["troubles"]) == (9, 9, [])
    assert 0 < result["unit_ms"]["p50"] <= result["unit_ms"]["p99"] <= result["unit_ms"]["max"]
    assert result["latency_ms"]["units"] == 9
    assert result["latency_ms"]["p50"] > 0
    assert result["misses"] == result["unit_ms"]["misses"]
    memory = result["memory_per_session"]
    assert 60 <= memory["residents_peak"] < 120
    assert memory["kv_bytes"]["max"] >= memory["kv_bytes"]["mean"] > 0
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


async def test_churn_tells_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.load.churn.SETTLED_S", 2.0)
    async with endpoint(rows=2) as at:
        held = await at.client().audio.connect(model=MODEL)  # somebody else's
        assert await load(at.address, tmp_path, "--clients", "2", "--churn", "6") == 1
        assert json.loads((tmp_path / "churn.json").read_text())["left"]["sessions"] == 1
        await held.close()
        assert await load(at.address, tmp_path, "--clients", "2", "--churn", "6") == 0
    result = json.loads((tmp_path / "churn.json").read_text())
    assert result["sessions"] == 6
    assert result["troubles"] == []
    assert set(result["left"].values()) == {0}


async def test_a_call_that_is_not_taken_is_told_of(tmp_path: Path) -> None:
    async with endpoint(rows=1) as at:
        options = ["--address", at.address, "--name", "another", "--out", str(tmp_path), "--churn", "2"]
        assert await asyncio.to_thread(main, options) == 1
    troubles = json.loads((tmp_path / "churn.json").read_text())["troubles"]
    assert len(troubles) == 2
    assert "model_not_found" in troubles[0]


@pytest.mark.parametrize(
    "wrong", [["--clients", "0"], ["--minutes", "0"], ["--minutes", "nan"], ["--churn", "0"], ["--budget", "-1"]]
)
def test_wrong_options_are_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(wrong)
    assert left.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
