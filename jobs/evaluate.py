"""Runs an evaluation suite: `python -m jobs.evaluate --suite NAME [--sessions N] [--seed 0] [--out DIR]`.

embedded           held-out ten-minute conversations of the embedded world (the default)
longspeech         word errors over long sessions and temporal questions: LongSpeech's files in --data, or without it an
                   equivalent set of the embedded world
full-duplex-bench  takeover, latency and back-channels on the files of Full-Duplex-Bench v1.0 in --data

Results go to DIR: results.json, report.md, plots; raw results, one file a (session, system), to DIR/raw: a run that is
started again only does what is missing or was made with other weights.  `--sessions` and `--systems` narrow it for a
quick look.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a2t.data import embedded_corpus
from a2t.data.manifest import Manifest, Row
from a2t.eval.streaming import DEFAULT_SYSTEMS, RATE, SYSTEMS, SessionRun, System, fingerprint, stream_session
from jobs._suites import EMBEDDED, Paths, run_tasks, unit_done, weights

CAPACITY = 16384
"""Positions of an arena row; ten minutes without eviction take about 11,500."""


@dataclass(frozen=True)
class Task:
    row: Row
    audio: Path
    system: System
    folders: tuple[Path, ...]
    out: Path

    @property
    def units(self) -> int:
        return self.row.units()

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.system, self.row, [self.audio, *(w for f in self.folders for w in weights(f))])

    def done(self) -> bool:
        return self.out.exists() and SessionRun.read(self.out).fingerprint == self.fingerprint


@functools.cache
def load_model(folders: tuple[Path, ...]) -> Any:
    from a2t.models.tiny import load_tiny

    return load_tiny(folders[0], folders[1] if len(folders) > 1 else None)


def work(task: Task) -> None:
    import soundfile

    from a2t.duplex.engine import Engine

    pcm_S, rate = soundfile.read(task.audio, dtype="float32")
    assert rate == RATE, f"{task.audio} has {rate} Hz"
    engine = Engine(load_model(task.folders), rows=1, capacity=CAPACITY)
    ask_text = task.system.side_channel and task.system.policy == "a2t"
    run = stream_session(engine, task.system, task.row, pcm_S, task.fingerprint, ask_text, unit_done)
    run.write(task.out)


def embedded(args: argparse.Namespace) -> str:
    from a2t.eval.embedded import figures, results
    from a2t.eval.report import write_report

    args.sessions = args.sessions or 20
    systems = [SYSTEMS[name] for name in args.systems or DEFAULT_SYSTEMS]
    paths = Paths(args.base, args.adapter, args.no_distillation)
    folders = {s.name: tuple(paths.of(s)) for s in systems}  # before hours of work, not after
    print(f"rendering {args.sessions} held-out conversations (split test, seed {args.seed}) ...", flush=True)
    corpus = args.out / "sessions" / f"seed{args.seed}-{args.sessions}"
    manifest = embedded_corpus.held_out(corpus, args.sessions, args.seed)
    rows = Manifest.read(manifest)
    tasks = {
        (row.id, s.name): Task(
            row,
            Path(Manifest.audio_path(manifest, row)),
            s,
            folders[s.name],
            args.out / "raw" / f"seed{args.seed}" / f"{row.id}.{s.name}.json",
        )
        for row in rows
        for s in systems
    }
    missing = [t for t in tasks.values() if not t.done()]
    print(f"{len(tasks) - len(missing)} of {len(tasks)} raw results are there", flush=True)
    if missing:
        run_tasks(missing, work, args.workers)
    runs = {key: SessionRun.read(t.out) for key, t in tasks.items()}
    found = {s.name: figures([(r, runs[r.id, s.name]) for r in rows], s.side_channel) for s in systems}
    minutes = sum(r.duration for r in rows) / 60
    voices = sorted({r.speaker for r in rows})
    heading = (
        f"{len(rows)} conversations, {minutes:.0f} minutes, seed {args.seed}, split `test`: held-out sentences, "
        f"held-out combinations and held-out voices ({', '.join(voices)})."
    )
    pair = [runs.get((rows[0].id, name)) for name in ("a2t", "unbounded")]
    example = (pair[0], pair[1]) if pair[0] and pair[1] else None
    return write_report(args.out, results(found), found, heading, example)


def longspeech(args: argparse.Namespace) -> str:
    from jobs._longspeech import longspeech

    return longspeech(args)


def full_duplex_bench(args: argparse.Namespace) -> str:
    from jobs._full_duplex_bench import full_duplex_bench

    return full_duplex_bench(args)


SUITES = {"embedded": embedded, "longspeech": longspeech, "full-duplex-bench": full_duplex_bench}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=sorted(SUITES), default="embedded")
    parser.add_argument("--sessions", type=int, help="how many (default: 20; of a benchmark's files the first 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/evaluate"))
    parser.add_argument(
        "--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes, one thread each; 0: here"
    )
    parser.add_argument("--systems", type=lambda s: s.split(","), metavar="A,B,...")
    parser.add_argument("--base", type=Path, default=EMBEDDED)
    parser.add_argument("--adapter", type=Path, default=EMBEDDED / "adapter")
    parser.add_argument("--no-distillation", type=Path, default=EMBEDDED / "adapter_no_distillation")
    parser.add_argument("--data", type=Path, help="the benchmark's files")
    parser.add_argument("--minutes", type=float, default=10, help="longspeech without --data: length of a session")
    parser.add_argument("--language", default="en", help="longspeech: which samples of --data")
    parser.add_argument("--verdicts", type=Path, help="longspeech: a judge's, JSON lines {system, line, verdict}")
    parser.add_argument("--score-only", action="store_true", help="full-duplex-bench: score the output.json in --data")
    parser.add_argument("--reference", type=Path, help="full-duplex-bench: people's back-channel distributions (JSON)")
    args = parser.parse_args(argv)
    if unknown := [s for s in args.systems or () if s not in SYSTEMS]:
        parser.error(f"no system {', '.join(unknown)}; choose from {', '.join(SYSTEMS)}")
    if (args.sessions is not None and args.sessions < 1) or args.workers < 0:
        parser.error("--sessions is at least 1, --workers at least 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        print(SUITES[args.suite](args))
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    print(f"written to {args.out}/: results.json, report.md and what is behind them")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
