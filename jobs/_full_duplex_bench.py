"""The suite full-duplex-bench of jobs.evaluate."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from a2t.audio.files import audio_info
from a2t.eval.full_duplex_bench import MARKS, TaskScore, score_task
from a2t.eval.full_duplex_stream import FOLDERS, output_of, segments_of, stream_sample
from a2t.eval.streaming import SYSTEMS, System
from jobs._longspeech import POSITIONS_A_SECOND, load
from jobs._suites import Paths, run_tasks, unit_done, weights

REFERENCE = "icc_gt_distribution.json"


@dataclass(frozen=True)
class Task:
    """One sample through one system."""

    task: str
    sample: Path
    system: System
    folders: tuple[Path, ...]
    out: Path

    @property
    def units(self) -> int:
        return math.ceil(audio_info(self.sample / "input.wav").seconds)


def work(task: Task) -> None:
    from a2t.duplex.decoding import DuplexConfig
    from a2t.duplex.engine import Engine, EngineConfig

    model = load(task.folders)
    capacity = 4096 + POSITIONS_A_SECOND * task.units
    engine = Engine(model, rows=1, capacity=capacity, config=EngineConfig(side_channel_budget_s=None))
    audio = task.sample / "input.wav"
    said = stream_sample(engine, task.system, audio, DuplexConfig.of(model, greedy=True), unit_done)
    task.out.mkdir(parents=True, exist_ok=True)
    since = 0.0
    if (mark := MARKS.get(task.task)) is not None:
        shutil.copy(task.sample / mark, task.out / mark)
        if task.task == "user_interruption":
            since = json.loads((task.sample / mark).read_text())[0]["timestamp"][1]
    output = output_of(said, since)
    (task.out / "segments.json").write_text(json.dumps(segments_of(output, audio_info(audio).seconds)))
    (task.out / "output.json").write_text(json.dumps(output))  # last: it says that the sample is done


def full_duplex_bench(args: argparse.Namespace) -> str:
    if args.data is None:
        raise ValueError("full-duplex-bench needs --data: the folder that holds candor_pause_handling/ and the others")
    found = {name: args.data / name for name in FOLDERS if (args.data / name).is_dir()}
    if not found:
        raise ValueError(f"{args.data} holds none of {', '.join(FOLDERS)}")
    path = args.reference or args.data / REFERENCE
    reference = json.loads(path.read_text()) if path.is_file() else None
    if args.score_only:
        note = "As recognised: the `output.json` that lies in each sample."
        scores = {"as recognised": {name: score_task(FOLDERS[name], p, reference) for name, p in found.items()}}
    else:
        note = (
            "From the words that the model says, on its own clock (a2t/eval/full_duplex_stream.py): "
            "no speech was made or recognised, so these are not the benchmark's own figures."
        )
        scores = _stream(args, found, reference)
    text = "\n".join(["# Full-Duplex-Bench v1.0", "", note, "", *_table(scores), ""])
    flat = {f"{name}.{system}": vars_of(s) for system, tasks in scores.items() for name, s in tasks.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(flat, indent=1) + "\n", encoding="utf-8")
    (args.out / "report.md").write_text(text, encoding="utf-8")
    return text


def _stream(
    args: argparse.Namespace, found: Mapping[str, Path], reference: Mapping[str, Sequence[float]] | None
) -> dict[str, dict[str, TaskScore]]:
    systems = [SYSTEMS[name] for name in args.systems or ("a2t", "base")]
    paths = Paths(args.base, args.adapter, args.no_distillation)
    tasks, raw = [], {}
    for system in systems:
        folders = tuple(paths.of(system))
        digest = hashlib.sha256(b"".join(w.read_bytes() for f in folders for w in weights(f))).hexdigest()
        raw[system.name] = args.out / "raw" / f"{system.name}-{digest[:12]}"
        for name, folder in found.items():
            samples = sorted(p for p in folder.iterdir() if p.name.isdigit())
            for sample in samples[: args.sessions]:
                out = raw[system.name] / name / sample.name
                tasks.append(Task(FOLDERS[name], sample, system, folders, out))
    missing = [t for t in tasks if not (t.out / "output.json").exists()]
    print(f"{len(tasks) - len(missing)} of {len(tasks)} samples are there", flush=True)
    if missing:
        run_tasks(missing, work, args.workers)
    return {s: {n: score_task(FOLDERS[n], folder / n, reference) for n in found} for s, folder in raw.items()}


def vars_of(score: TaskScore) -> dict[str, float | int | None]:
    return {
        "samples": len(score.samples),
        "takeover": score.takeover_rate,
        "latency_s": score.latency,
        "backchannels_a_second": score.frequency,
        "backchannel_distance": score.distance,
    }


def _table(scores: Mapping[str, Mapping[str, TaskScore]]) -> list[str]:
    lines = ["| folder | system | samples | takeover | latency, s | back-channels / s | distance |"]
    lines.append("|" + "---|" * 7)
    for system, tasks in scores.items():
        for name, score in tasks.items():
            figures = ["-" if f is None else f"{f:.3f}" for f in list(vars_of(score).values())[1:]]
            lines.append(f"| {name} | {system} | {len(score.samples)} | {' | '.join(map(str, figures))} |")
    return lines
