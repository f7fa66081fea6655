"""The training loop: plans the steps, feeds them, keeps checkpoints. It knows no Ray; `jobs/distill.py` calls it.

    adapter = distill(modules.llm, tokens, corpus, "out", PRESETS["embedded"])

trains on one process; under torch.distributed every worker calls it and the result is the same.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3ForCausalLM

from a2t.distill.batches import Batch, collate, counts_of, plan_epoch, split_step
from a2t.distill.config import DistillConfig
from a2t.distill.corpus import Corpus, Joined
from a2t.distill.losses import Counts
from a2t.distill.sequences import Pair, draw_budget, hidden_from, pair
from a2t.distill.step import Optimizer, StepLog, Student, sum_over_workers, train_step, world
from a2t.distill.teacher import TeacherStore, model_hash
from a2t.duplex.protocol import SpecialTokens
from a2t.models.adapters import continue_adapter, save_adapter

Forward = Callable[[], tuple[Batch, bool]]


class Distillation:
    """A student, its optimizer and the steps ahead of it.

    `corpus` are single utterances; they are joined here as the settings say.  `teacher`: a store made for the same
    corpus and settings, or None to run the frozen model beside the student.  `wrap` puts the student into what
    averages gradients over workers (DistributedDataParallel).
    """

    def __init__(
        self,
        language: Qwen3ForCausalLM,
        tokens: SpecialTokens,
        corpus: Corpus,
        config: DistillConfig,
        teacher: TeacherStore | None = None,
        wrap: Callable[[nn.Module], nn.Module] = lambda student: student,
        start_from: str | Path | None = None,
    ):
        if not len(corpus):
            raise ValueError("the corpus is empty: there is nothing to train on")
        self.tokens, self.config, self.teacher = tokens, config, teacher
        self.corpus = Joined(corpus, config)
        if teacher is not None and (missing := [i for i in self.corpus.ids if i not in teacher]):
            raise ValueError(
                f"the teacher's store {teacher.folder} lacks {len(missing)} of {len(self.corpus)} streams, the first "
                f"is {missing[0]!r}: make it from the same corpus with the same join_units, join_share and seed"
            )
        torch.manual_seed(config.seed)  # LoRA's first matrices
        self.student = Student(language, tokens, config)
        if start_from is not None:
            continue_adapter(self.student.peft, start_from)
        epochs = [plan_epoch(self.corpus.units, config, e) for e in range(config.epochs)]
        self.steps = [(e, step) for e, steps in enumerate(epochs) for step in steps][: config.max_steps]
        self.optimizer = Optimizer.of(self.student, len(self.steps))
        self.wrapped = wrap(self.student)

    @property
    def done(self) -> int:
        return self.optimizer.done

    def step(self) -> StepLog:
        """Takes the next step."""
        torch.manual_seed(self.config.seed + 1 + self.done)  # dropout, the same after a resume
        forwards, counts = self.forwards(self.done)
        return train_step(self.wrapped, self.optimizer, forwards, counts)

    def forwards(self, step: int) -> tuple[list[Forward], Counts]:
        """This worker's part of step `step`: its forwards, and how many rows they have."""
        rank, workers = world()
        epoch, indices = self.steps[step]
        mine = split_step(indices, self.estimated_positions, workers, self.config.micro_positions)[rank]
        shortest = min(indices, key=self.estimated_positions)
        out: list[Forward] = []
        counts = Counts()
        for group in mine:
            pairs = [pair(self.tokens, self.corpus[i]) for i in group or [shortest]]
            counts += counts_of(pairs) if group else Counts()
            out.append(lambda pairs=pairs, real=bool(group): (self.collate(pairs, epoch), real))  # type: ignore[misc]
        return out, counts

    def collate(self, pairs: Sequence[Pair], epoch: int) -> Batch:
        hidden: list[list[int] | None] = []
        for p in pairs:
            draw = draw_budget(self.config.eviction, len(p.student), self.config.seed, epoch, p.example.id)
            hidden.append(None if draw is None else hidden_from(p.student, *draw))
        taught = None if self.teacher is None else [self.teacher.hidden(p.example) for p in pairs]
        return collate(pairs, hidden, taught)

    def estimated_positions(self, index: int) -> int:
        """Good enough to balance forwards, without reading the example: 13 positions a unit and about 3 of text."""
        return 16 * self.corpus.units[index] + 32

    # Checkpoints

    def save(self, folder: Path, base: str = "") -> None:
        """Everything that a resumed run needs; the folder is also a PEFT adapter. Call on one worker."""
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        save_adapter(self.student.peft, part, base=base)
        names: dict[Any, str] = {p: n for n, p in self.student.trainable().items()}
        tensors = {f"param.{n}": p.detach().cpu().contiguous() for p, n in names.items()}
        for p, state in self.optimizer.adam.state.items():
            tensors |= {f"{key}.{names[p]}": value.detach().cpu().contiguous() for key, value in state.items()}
        save_file(tensors, part / "training.safetensors")
        state = {"done": self.done, "steps": len(self.steps), "config": dataclasses.asdict(self.config)}
        (part / "training.json").write_text(json.dumps(state, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        part.replace(folder)

    def load(self, folder: Path) -> None:
        """Goes on from `save`. Raises ValueError if it was written under other settings or by another model."""
        state = json.loads((folder / "training.json").read_text())
        now = json.loads(json.dumps(dataclasses.asdict(self.config)))
        if differing := [k for k in now if state["config"].get(k) != now[k]]:
            raise ValueError(f"{folder} was trained with another {', '.join(differing)}; start in an empty folder")
        if state["steps"] != len(self.steps):
            raise ValueError(f"{folder} was trained on another corpus ({state['steps']} steps, now {len(self.steps)})")
        tensors = load_file(folder / "training.safetensors")
        for name, p in self.student.trainable().items():
            if f"param.{name}" not in tensors or tensors[f"param.{name}"].shape != p.shape:
                raise ValueError(f"{folder}: no tensor for {name}; the checkpoint is of another model")
            with torch.no_grad():
                p.copy_(tensors[f"param.{name}"])
            kept = {
                key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors
            }
            if kept:
                self.optimizer.adam.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in kept.items()}
        self.optimizer.done = state["done"]


def distill(
    language: Qwen3ForCausalLM,
    tokens: SpecialTokens,
    corpus: Corpus,
    out: str | Path,
    config: DistillConfig,
    *,
    teacher: TeacherStore | str | Path | None = None,
    base: str = "",
    start_from: str | Path | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda student: student,
    on_step: Callable[[StepLog, int], None] = lambda log, total: None,
    on_checkpoint: Callable[[Path, StepLog], None] | None = None,
    resume_from: str | Path | None = None,
    checkpoint_seconds: float = 300.0,
    keep: int = 2,
) -> Path:
    """Trains an adapter and returns its folder, `out`/adapter, which `PeftModel.from_pretrained` loads.

    `language` is the frozen base and is wrapped in place.  Logs every step to `out`/log.jsonl and writes a checkpoint
    every `checkpoint_seconds`, the last `keep` of which stay; a run in the same `out` goes on from the newest one, or
    from `resume_from`.  With `on_checkpoint`, all workers call it at each checkpoint, and it takes the folder over
    (nothing is pruned here).  `base` is what the adapter's card calls its base model.  `start_from` is an earlier
    adapter that this one goes on from: short utterances first, then joined streams.
    """
    out = Path(out)
    rank = world()[0]
    if isinstance(teacher, (str, Path)):
        teacher = TeacherStore(teacher, model_hash(language, tokens))
    run = Distillation(language, tokens, corpus, config, teacher, wrap, start_from)
    checkpoints = out / "checkpoints"
    newest = Path(resume_from) if resume_from is not None else _newest(checkpoints)
    if newest is not None:
        run.load(newest)
    if rank == 0:
        checkpoints.mkdir(parents=True, exist_ok=True)
        _cut_log(out / "log.jsonl", run.done)
    saved = time.monotonic()
    log = None
    while run.done < len(run.steps):
        log = run.step()
        if rank == 0:
            with (out / "log.jsonl").open("a") as lines:
                lines.write(json.dumps(log_line(log)) + "\n")
        on_step(log, len(run.steps))
        due = rank == 0 and time.monotonic() - saved >= checkpoint_seconds
        if sum_over_workers([float(due)])[0] or run.done == len(run.steps):  # all workers agree
            folder = checkpoints / f"step-{run.done:06d}"
            if rank == 0:
                run.save(folder, base)
            saved = time.monotonic()
            if on_checkpoint is not None:
                on_checkpoint(folder, log)
            elif rank == 0:
                _prune(checkpoints, keep)
    if rank == 0:
        save_adapter(run.student.peft, out / "adapter", base=base)
    return out / "adapter"


def log_line(log: StepLog) -> dict[str, Any]:
    """Flat values of a step, for a log file or a dashboard."""
    names = ("listen", "speak", "other", "turn_end", "continuation")
    return {
        "step": log.step,
        "loss": log.loss,
        **log.terms,
        "gradient_norm": log.gradient_norm,
        "learning_rate": log.learning_rate,
        "positions": log.positions,
        "units": log.units,
        "targets": log.counts.targets,
        **{f"events_{n}": c for n, c in zip(names, log.counts.groups, strict=True)},
    }


def _newest(checkpoints: Path) -> Path | None:
    found = sorted(p for p in checkpoints.glob("step-*") if p.suffix != ".part" and (p / "training.json").is_file())
    return found[-1] if found else None


def _prune(checkpoints: Path, keep: int) -> None:
    for old in sorted(p for p in checkpoints.glob("step-*") if p.suffix != ".part")[:-keep]:
        shutil.rmtree(old)


def _cut_log(path: Path, done: int) -> None:
    """Steps after the checkpoint are taken again: their lines go."""
    if path.is_file():
        lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= done]
        path.write_text("".join(line + "\n" for line in lines))
