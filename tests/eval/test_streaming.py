"""Raw results against the engine's own books, on a random model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from a2t.data.manifest import Row, Turn
from a2t.duplex.engine import Engine
from a2t.eval.streaming import DEFAULT_SYSTEMS, RATE, SYSTEMS, SessionRun, System, fingerprint, stream_session
from a2t.models.tiny import TinyDuplex, random_tiny

SECONDS = 12


@pytest.fixture(scope="module")
def model() -> TinyDuplex:
    return random_tiny(3, layers=1)


@pytest.fixture(scope="module")
def pcm_S() -> np.ndarray:
    rng = np.random.default_rng(5)
    return (0.1 * rng.standard_normal(SECONDS * RATE - 400)).astype(np.float32)  # the last unit is not full


ROW = Row(
    "s",
    "s.wav",
    SECONDS,
    "v",
    "test",
    turns=(Turn("order_question", 8.3, 9.5, "w5 w6 w7"),),
    extra={"prompt": "w1 w2 w3"},
)


def stream(model: TinyDuplex, system: System, pcm_S: np.ndarray, ask: bool = False) -> SessionRun:
    return stream_session(Engine(model, rows=1, capacity=2048), system, ROW, pcm_S, "mark", ask)


def test_positions_add_up_to_the_residents_of_an_unbounded_run(model: TinyDuplex, pcm_S: np.ndarray) -> None:
    run = stream(model, SYSTEMS["unbounded"], pcm_S)
    assert len(run.units) == SECONDS
    total = np.cumsum([u.positions for u in run.units]) + 3  # the prompt
    assert [sum(u.residents.values()) for u in run.units] == total.tolist()
    assert run.peak == total[-1]
    assert run.units[-1].residents["audio"] == 10 * SECONDS and run.units[-1].residents["prefix"] == 3


def test_eviction_shows_in_the_raw_result(model: TinyDuplex, pcm_S: np.ndarray) -> None:
    run = stream(model, SYSTEMS["floor"], pcm_S)
    assert run.units[-1].residents["audio"] == 10 * 5  # the five most recent units stay
    assert sum(u.evicted for u in run.units) > 0
    assert run.peak < stream(model, SYSTEMS["unbounded"], pcm_S).peak


def test_asking_from_text_leaves_the_stream_alone(model: TinyDuplex, pcm_S: np.ndarray) -> None:
    quiet, asked = (stream(model, SYSTEMS["a2t"], pcm_S, ask) for ask in (False, True))
    assert quiet.text_answers == {} and list(asked.text_answers) == [0]
    strip = [[replace(u, unit_ms=0.0) for u in run.units] for run in (quiet, asked)]
    assert strip[0] == strip[1]


def test_a_raw_file_comes_back_as_it_was(model: TinyDuplex, pcm_S: np.ndarray, tmp_path: Path) -> None:
    run = stream(model, SYSTEMS["a2t"], pcm_S, ask=True)
    path = tmp_path / "raw" / "s.a2t.json"
    run.write(path)
    assert SessionRun.read(path) == run and run.fingerprint == "mark"
    path.write_text('{"session": "s"}')
    with pytest.raises(ValueError, match="delete it and run again"):
        SessionRun.read(path)


def test_a_fingerprint_sees_system_script_and_files(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    marks = {fingerprint(SYSTEMS[name], ROW, [weights]) for name in DEFAULT_SYSTEMS}
    assert len(marks) == len(DEFAULT_SYSTEMS)
    before = fingerprint(SYSTEMS["a2t"], ROW, [weights])
    assert before == fingerprint(replace(SYSTEMS["a2t"], says="other words"), ROW, [weights])
    weights.write_bytes(b"2")
    assert fingerprint(SYSTEMS["a2t"], ROW, [weights]) != before
