"""The suite longspeech of jobs.evaluate."""

from __future__ import annotations

import argparse
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a2t.eval import longspeech as suite
from a2t.eval.longspeech import LongRun, Session
from a2t.eval.longspeech_set import write_set
from a2t.eval.streaming import SYSTEMS, System
from jobs._suites import Paths, run_tasks, unit_done, weights

POSITIONS_A_SECOND = 24
"""Room for a system without eviction; memory is taken as it fills."""


@dataclass(frozen=True)
class Task:
    session: Session
    system: System
    folders: tuple[Path, ...]
    out: Path

    @property
    def units(self) -> int:
        return math.ceil(self.session.seconds)

    @property
    def fingerprint(self) -> str:
        return suite.fingerprint(self.system, self.session, [w for f in self.folders for w in weights(f)])

    def done(self) -> bool:
        return self.out.exists() and LongRun.read(self.out).fingerprint == self.fingerprint


@functools.cache
def load(folders: tuple[Path, ...]) -> Any:
    from a2t.models.loading import load_model

    return load_model(folders[0], folders[1] if len(folders) > 1 else None)


def work(task: Task) -> None:
    from a2t.duplex.decoding import DuplexConfig
    from a2t.duplex.engine import Engine, EngineConfig

    model = load(task.folders)
    capacity = 4096 + POSITIONS_A_SECOND * task.units
    # No deadline: what is written does not depend on the speed of the machine.
    engine = Engine(model, rows=1, capacity=capacity, config=EngineConfig(side_channel_budget_s=None))
    decoding = DuplexConfig.of(model, greedy=True)
    suite.stream_long(engine, task.system, task.session, decoding, task.fingerprint, unit_done).write(task.out)


def longspeech(args: argparse.Namespace) -> str:
    systems = [SYSTEMS[name] for name in args.systems or suite.SYSTEMS]
    paths = Paths(args.base, args.adapter, args.no_distillation)
    folders = {s.name: tuple(paths.of(s)) for s in systems}  # before hours of work, not after
    data: Path | None = args.data
    if data is None:
        count = args.sessions or 20
        print(
            f"rendering {count} sessions of {args.minutes:g} minutes (held-out voices, seed {args.seed}) ...",
            flush=True,
        )
        data = write_set(
            args.out / "sessions" / f"seed{args.seed}-{count}-{args.minutes:g}", count, args.seed, args.minutes
        )
        about = f"An equivalent set of the embedded world (seed {args.seed}, held-out voices), not LongSpeech itself."
    else:
        about = f"`{data.name}`, the first {args.sessions or 100} samples of each task with language `{args.language}`."
    sessions = suite.read_sessions(data, args.language, args.sessions or 100)
    if args.data is None:
        sessions = suite.read_sessions(data, args.language, None)
    tasks = {
        (s.name, system.name): Task(s, system, folders[system.name], args.out / "raw" / f"{s.name}.{system.name}.json")
        for s in sessions
        for system in systems
    }
    missing = [t for t in tasks.values() if not t.done()]
    print(f"{len(tasks) - len(missing)} of {len(tasks)} raw results are there", flush=True)
    if missing:
        run_tasks(missing, work, args.workers)
    runs = {y.name: [(s, LongRun.read(tasks[s.name, y.name].out)) for s in sessions] for y in systems}
    verdicts = suite.read_verdicts(args.verdicts) if args.verdicts else None
    found = suite.results(runs, verdicts)
    minutes = sum(s.seconds for s in sessions) / 60
    text = suite.markdown(found, runs, f"{about} {len(sessions)} sessions, {minutes:.0f} minutes.")
    with (args.out / "answers.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in suite.answers(runs))
    (args.out / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (args.out / "report.md").write_text(text, encoding="utf-8")
    return text
