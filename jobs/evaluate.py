"""Runs an evaluation suite: `python -m jobs.evaluate --suite embedded [--sessions 20] [--seed 0] [--out DIR]`.

The embedded suite streams held-out ten-minute conversations through each system and writes results.json, report.md and
plots into DIR.  Raw results lie in DIR/raw, one file a (session, system); a run that is started again only does what is
missing or was made with other weights.  `--sessions` and `--systems` narrow it for a quick look.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a2t.data import embedded_corpus
from a2t.data.manifest import Manifest, Row
from a2t.eval.streaming import DEFAULT_SYSTEMS, RATE, SYSTEMS, SessionRun, System, fingerprint, stream_session

EMBEDDED = Path(__file__).parents[1] / "a2t" / "models" / "embedded"
CAPACITY = 16384
"""Positions of an arena row; ten minutes without eviction take about 11,500."""


@dataclass(frozen=True)
class Paths:
    """Where the weights are: a model folder and two PEFT adapters."""

    base: Path
    adapter: Path
    no_distillation: Path

    def of(self, system: System) -> list[Path]:
        """Folders that the system's weights come from; ValueError naming one that is missing."""
        adapters = {"base": None, "student": self.adapter, "no_distillation": self.no_distillation}
        folders = [f for f in (self.base, adapters[system.weights]) if f is not None]
        for folder in folders:
            if not list(folder.glob("*.safetensors")):
                raise ValueError(
                    f"{folder} holds no .safetensors: system {system.name!r} needs it. Train it (jobs.pretrain_tiny, "
                    f"jobs.distill), point to it (--base, --adapter, --no-distillation), or leave the system out "
                    f"(--systems)"
                )
        return folders


@dataclass(frozen=True)
class Task:
    row: Row
    audio: Path
    system: System
    folders: tuple[Path, ...]
    out: Path

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.system, self.row, [self.audio, *(w for f in self.folders for w in weights(f))])

    def done(self) -> bool:
        return self.out.exists() and SessionRun.read(self.out).fingerprint == self.fingerprint


def weights(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*config.json")])


def start_worker(progress: Any) -> None:
    """One thread a process: more of them only spin on each other."""
    import torch

    torch.set_num_threads(1)
    globals()["_progress"] = progress


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
    put = globals()["_progress"].put
    ask_text = task.system.side_channel and task.system.policy == "a2t"
    run = stream_session(engine, task.system, task.row, pcm_S, task.fingerprint, ask_text, lambda: put(1))
    run.write(task.out)


def run_tasks(tasks: Sequence[Task], workers: int) -> None:
    """Streams every task, shows a bar over units; the first failure ends it, what is finished stays."""
    from tqdm import tqdm

    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        progress = manager.Queue()
        bar = tqdm(total=sum(t.row.units() for t in tasks), unit="unit", desc=f"{len(tasks)} streams", smoothing=0.05)
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(progress,))
        futures: list[Future[None]] = [pool.submit(work, t) for t in tasks]
        try:
            while not all(f.done() for f in futures):
                try:
                    bar.update(progress.get(timeout=0.5))
                except queue.Empty:
                    for f in futures:
                        if f.done():
                            f.result()
            for f in futures:
                f.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            bar.close()


def embedded(args: argparse.Namespace) -> str:
    from a2t.eval.embedded import figures, results
    from a2t.eval.report import write_report

    systems = [SYSTEMS[name] for name in args.systems]
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
        run_tasks(missing, args.workers)
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


SUITES = {"embedded": embedded}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="jobs.evaluate", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--suite", choices=sorted(SUITES), default="embedded")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/evaluate"))
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes, one thread each")
    parser.add_argument("--systems", type=lambda s: s.split(","), default=list(DEFAULT_SYSTEMS), metavar="A,B,...")
    parser.add_argument("--base", type=Path, default=EMBEDDED)
    parser.add_argument("--adapter", type=Path, default=EMBEDDED / "adapter")
    parser.add_argument("--no-distillation", type=Path, default=EMBEDDED / "adapter_no_distillation")
    args = parser.parse_args(argv)
    if unknown := [s for s in args.systems if s not in SYSTEMS]:
        parser.error(f"no system {', '.join(unknown)}; choose from {', '.join(SYSTEMS)}")
    if args.sessions < 1 or args.workers < 1:
        parser.error("--sessions and --workers must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        print(SUITES[args.suite](args))
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    print(f"written to {args.out}/: results.json, details.json, report.md, plots")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
