"""Streams a session through a system and keeps what happened in each unit: the raw results that every figure is
computed from.

A system is a set of weights under a policy and a budget.  One raw result is one JSON file, so an interrupted
evaluation goes on where it stopped; `fingerprint` tells whether a file is still about the same weights and audio.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from a2t.data.manifest import Row
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import ConversationConfig, Engine, UnitStats
from a2t.duplex.unit_loop import UnitResult
from a2t.models.base import DuplexModel

RATE = 16_000
Weights = Literal["base", "student", "no_distillation"]


@dataclass(frozen=True)
class System:
    """What is compared. `budget` None: no limit. `side_channel` False: the model streams natively."""

    name: str
    weights: Weights
    policy: str
    budget: int | None = None
    side_channel: bool = True
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    says: str = ""

    def conversation(self, prompt: str | None, model: DuplexModel | None = None) -> ConversationConfig:
        """By the model's own duplex rules (None: the embedded default's), greedily."""
        rules = model.decoding if model is not None else {}
        return ConversationConfig(
            budget=self.budget,
            policy=self.policy,
            policy_options=dict(self.policy_options),
            duplex=DuplexConfig(**{**rules, "greedy": True, "side_channel": self.side_channel}),
            system_prompt=prompt,
        )


SYSTEMS: dict[str, System] = {
    s.name: s
    for s in (
        System("a2t", "student", "a2t", 4000, says="student, B = 4,000"),
        System("base", "base", "unbounded", side_channel=False, says="native base, no eviction"),
        System("unbounded", "student", "unbounded", says="student, no eviction"),
        System("floor", "student", "a2t", 0, says="student, B = 0"),
        System("a2t_1000", "student", "a2t", 1000, says="student, B = 1,000"),
        # The fair baseline of eviction without text is the model that StreamingLLM would be used on: the native one.
        # The student under the same window, its side channel shut, can be asked for beside it.
        System("streaming_llm", "base", "streaming_llm", side_channel=False, says="native base, sink 4 + recent 2,000"),
        System("no_distillation", "no_distillation", "a2t", 4000, says="trained without distillation, B = 4,000"),
        System(
            "streaming_llm_student",
            "student",
            "streaming_llm",
            side_channel=False,
            says="student, side channel shut, sink 4 + recent 2,000",
        ),
    )
}
DEFAULT_SYSTEMS = tuple(name for name in SYSTEMS if name != "streaming_llm_student")


@dataclass(frozen=True)
class UnitRun:
    """One unit of one session. `positions`: how many it fed; `residents` by kind, after eviction."""

    listening: bool
    end_of_turn: bool
    response: str
    transcript: str
    unit_ms: float
    positions: int
    evicted: int
    residents: dict[str, int]
    closed_by: str | None = None

    @property
    def speaks(self) -> bool:
        """Says something; a unit that only ends a turn does not."""
        return not self.listening and (bool(self.response) or not self.end_of_turn)

    @property
    def leaves_turn_open(self) -> bool:
        return not self.listening and not self.end_of_turn


@dataclass(frozen=True)
class SessionRun:
    """`peak`: most residents ever, inside units too; `text_answers`: to the order questions, by index of the turn, from
    the transcript re-encoded without any audio, asked just before the question is heard."""

    session: str
    system: str
    fingerprint: str
    peak: int
    units: list[UnitRun]
    text_answers: dict[int, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(asdict(self), ensure_ascii=False), encoding="utf-8")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> SessionRun:
        """ValueError where the file is not what `write` wrote."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values["units"] = [UnitRun(**u) for u in values["units"]]
            values["text_answers"] = {int(k): v for k, v in values["text_answers"].items()}
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not a raw result of this suite ({error}): delete it and run again") from error


def fingerprint(system: System, row: Row, files: Iterable[Path]) -> str:
    """SHA-256 over the system, the session's script and the bytes of `files` (its audio, the weights)."""
    spec = {k: v for k, v in asdict(system).items() if k != "says"}
    digest = hashlib.sha256(json.dumps([spec, row.to_json()], sort_keys=True).encode())
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def stream_session(
    engine: Engine,
    system: System,
    row: Row,
    pcm_S: np.ndarray,
    mark: str = "",
    ask_text: bool = False,
    on_unit: Callable[[], None] = lambda: None,
) -> SessionRun:
    """Streams `pcm_S` (16 kHz float32, padded to whole units) second by second, as fast as the engine is.

    `ask_text`: also ask each order question as text just before it is heard: `Engine.ask` drops nothing, it re-encodes
    the transcript on a scratch row, so the live stream is not disturbed and the question's own words are not in it.
    `mark` is kept as the run's fingerprint; `on_unit` is called after each unit.
    """
    units = -(-len(pcm_S) // RATE)
    pcm_S = np.pad(np.asarray(pcm_S, np.float32), (0, units * RATE - len(pcm_S)))
    due: dict[int, list[int]] = {}
    for i, turn in enumerate(row.turns):
        if ask_text and turn.kind == "order_question":
            due.setdefault(int(turn.start), []).append(i)
    conversation = engine.open(system.conversation(row.extra.get("prompt"), engine.model))
    runs: list[UnitRun] = []
    answers: dict[int, str] = {}
    peak = 0
    try:
        for u in range(units):
            for i in due.get(u, ()):
                answers[i] = engine.ask(conversation, row.turns[i].text)
            engine.push(conversation, pcm_S[u * RATE : (u + 1) * RATE])
            for _, result, stats in engine.run():
                runs.append(_unit_run(result, stats, engine))
                peak = max(peak, stats.peak)
                on_unit()
    finally:
        engine.close(conversation)
    assert len(runs) == units, f"{units} s of audio gave {len(runs)} units"
    return SessionRun(row.id, system.name, mark, peak, runs, answers)


def _unit_run(result: UnitResult, stats: UnitStats, engine: Engine) -> UnitRun:
    segment = len(result.transcript_ids) + 2 if result.segment_opened else 0
    return UnitRun(
        listening=result.listening,
        end_of_turn=result.end_of_turn,
        response=result.response_text,
        transcript=result.transcript_text,
        unit_ms=round(stats.unit_ms, 3),
        positions=1 + engine.model.encoder.embeddings_per_unit + len(result.native_ids) + segment + 1,
        evicted=stats.evicted,
        residents={kind.name.lower(): n for kind, n in stats.residents.items() if n},
        closed_by=result.segment_closed_by,
    )
