"""Scripted streams: what a model did is written down by hand, so the right figures are known."""

from collections.abc import Callable, Mapping

import pytest

from a2t.data.manifest import Row, Turn, Word
from a2t.eval.streaming import SessionRun, UnitRun

Script = Mapping[int, str]
RunMaker = Callable[..., SessionRun]


def scripted_run(
    units: int,
    responses: Script | None = None,
    transcripts: Script | None = None,
    session: str = "s",
    system: str = "a2t",
    unit_ms: float = 100.0,
    peak: int = 4010,
    text_answers: Mapping[int, str] | None = None,
) -> SessionRun:
    """`responses[u]`: words said in unit u; a trailing "." ends the turn there, "." alone only ends it, "-" speaks
    without a word. Every other unit listens."""

    said_in, written_in = responses or {}, transcripts or {}

    def unit(u: int) -> UnitRun:
        said = said_in.get(u)
        return UnitRun(
            listening=said is None,
            end_of_turn=bool(said) and said.endswith("."),
            response=(said or "").strip(".-").strip(),
            transcript=written_in.get(u, ""),
            unit_ms=unit_ms,
            positions=13,
            evicted=0,
            residents={"audio": 10 * (u + 1), "transcript": u, "prefix": 4},
        )

    return SessionRun(session, system, "", peak, [unit(u) for u in range(units)], dict(text_answers or {}))


def script(duration: float, turns: list[Turn], words: list[Word] | None = None, id: str = "s") -> Row:
    return Row(id, f"{id}.wav", duration, "voice", "test", tuple(words or ()), tuple(turns))


@pytest.fixture
def make_run() -> RunMaker:
    return scripted_run


@pytest.fixture
def make_row() -> Callable[..., Row]:
    return script
