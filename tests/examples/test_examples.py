"""Each example, run as it says it is to be run, but in this process."""

from __future__ import annotations

import asyncio
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from a2t.audio.files import write_wav
from a2t.data.espeak import SAMPLE_RATE, Espeak
from a2t.models.tiny import ADAPTER
from serve_apps.engine_host import HostConfig
from tests.serve.endpoint import endpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
RATE = 16_000
FACT, QUESTION = "the red key is in the kitchen", "where is the red key"


def example(name: str) -> Callable[[list[str]], None]:
    main = runpy.run_path(str(EXAMPLES / name))["main"]
    assert callable(main)
    return main


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A fact, a pause, a question."""
    engine = Espeak()
    said = [soxr.resample(engine.say(text).pcm_S, SAMPLE_RATE, RATE) for text in (FACT, QUESTION)]
    quiet_S = np.zeros(RATE, np.float32)
    path = tmp_path_factory.mktemp("talk") / "talk.wav"
    write_wav(path, np.concatenate([quiet_S, quiet_S, quiet_S, said[0], quiet_S, said[1]]).astype(np.float32))
    return str(path)


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text))


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text()
    assert not [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in here]


def test_stream_a_file(talk: str, capsys: pytest.CaptureFixture[str]) -> None:
    example("stream_a_file.py")([talk, "--budget", "60"])
    out = capsys.readouterr().out
    residents = [int(n) for n in re.findall(r"(\d+) resident", out)]
    assert len(residents) >= 8
    assert max(residents) < 13 * len(residents)  # what so many seconds leave that are all kept, without any words
    assert words(FACT) & words(out)


def test_own_adapter(talk: str, capsys: pytest.CaptureFixture[str]) -> None:
    example("own_adapter.py")([str(ADAPTER), talk])
    out = capsys.readouterr().out
    assert out.startswith("LORA, rank 16, on ")
    heard = words(out.partition("heard:")[2])
    assert len(heard & words(FACT + " " + QUESTION)) >= 4


def test_eviction_policy(talk: str, capsys: pytest.CaptureFixture[str]) -> None:
    example("eviction_policy.py")([talk, "--seconds", "2"])
    lines = capsys.readouterr().out.splitlines()
    audio = [int(re.findall(r"'audio': (\d+)", line)[0]) for line in lines]
    assert audio[:2] == [10, 20]
    assert audio[2:] == [20] * (len(audio) - 2)


async def test_realtime_client_and_ask_a_session(talk: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = tmp_path / "answer.wav"
    async with endpoint(rows=1, model=HostConfig().model, capacity=1024) as at:
        where = ["--url", at.address]
        await asyncio.to_thread(example("realtime_client.py"), [talk, *where, "--wait", "4", "--out", str(answer)])
        out = capsys.readouterr().out
        assert "heard:" in out
        assert "error:" not in out
        assert "said:" in out
        assert soundfile.info(str(answer)).samplerate == 24_000
        await at.empty()
        ask = example("ask_a_session.py")
        await asyncio.to_thread(ask, where)
        session, state = capsys.readouterr().out.split()[:2]
        assert state == "closed"
        await asyncio.to_thread(ask, [session, *where])
        assert words(capsys.readouterr().out) & words(FACT)
        await asyncio.to_thread(ask, [session, QUESTION, *where])
        assert capsys.readouterr().out.strip()
