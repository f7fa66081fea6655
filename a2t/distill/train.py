"""The training loop: plans the steps, feeds them, keeps checkpoints. It knows no Ray; `jobs/distill.py` calls it.

    adapter = distill(modules.llm, tokens, corpus, "out", PRESETS["embedded"])

trains on one process; under torch.distributed every worker calls it and the result is the same.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from a2t.distill.batches import Batch, collate, counts_of, plan_epoch, split_step
from a2t.distill.config import DistillConfig
from a2t.distill.corpus import Corpus, Joined
from a2t.distill.losses import Counts
from a2t.distill.optimizer import Optimizer, Wrap, sum_over_workers, world
from a2t.distill.packing import View
from a2t.distill.place import Place
from a2t.distill.run_folder import LAST, RunFolder, best_of, local_adapter
from a2t.distill.sequences import Pair, draw_budget, hidden_from, pair, view_of
from a2t.distill.step import StepLog, Student, train_step
from a2t.distill.teacher import TeacherStore, model_hash
from a2t.distill.zero import ZeroOptimizer
from a2t.duplex.protocol import SpecialTokens
from a2t.models.adapters import continue_adapter, save_adapter

Forward = Callable[[], tuple[Batch, bool]]
Validate = Callable[[Place], dict[str, float]]
"""Figures of the adapter in a checkpoint, `score` among them (lower is better). All workers call it together."""


class Distillation:
    """A student, its optimizer and the steps ahead of it.

    `corpus` are single utterances; they are joined here as the settings say.  `teacher`: a store made for the same
    corpus and settings, or None to run the frozen model beside the student.  `wrap` puts the student into what
    averages gradients over workers (DistributedDataParallel); `zero` shards it with DeepSpeed instead (stage 2 or 3).
    """

    def __init__(
        self,
        language: Qwen3ForCausalLM,
        tokens: SpecialTokens,
        corpus: Corpus,
        config: DistillConfig,
        teacher: TeacherStore | None = None,
        wrap: Wrap = lambda student: student,
        start_from: str | Path | None = None,
        zero: int | None = None,
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
            with local_adapter(Place(start_from)) as folder:
                continue_adapter(self.student.peft, folder)
        epochs = [plan_epoch(self.corpus.units, config, e) for e in range(config.epochs)]
        self.steps = [(e, step) for e, steps in enumerate(epochs) for step in steps][: config.max_steps]
        named, total = self.student.trainable(), len(self.steps)
        self.optimizer = (
            Optimizer(self.student, named, config, total, wrap)
            if zero is None
            else ZeroOptimizer(self.student, named, config, total, zero)
        )

    @property
    def done(self) -> int:
        return self.optimizer.done

    @property
    def epoch_ended(self) -> int | None:
        """The epoch whose last step was the last one taken."""
        if not self.done or (self.done < len(self.steps) and self.steps[self.done][0] == self.steps[self.done - 1][0]):
            return None
        return self.steps[self.done - 1][0]

    def step(self) -> StepLog:
        """Takes the next step."""
        torch.manual_seed(self.config.seed + 1 + self.done)  # dropout, the same after a resume
        forwards, counts = self.forwards(self.done)
        return train_step(self.optimizer, forwards, counts)

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
        assert self.tokens.asr_end is not None
        views: list[View | None] = []
        for p in pairs:
            draw = draw_budget(self.config.eviction, len(p.student), self.config.seed, epoch, p.example.id)
            gone = None if draw is None else hidden_from(p.student, *draw)
            views.append(view_of(p.student, gone, self.config.hide_transcript, self.tokens.asr_end))
        taught = None if self.teacher is None else [self.teacher.hidden(p.example) for p in pairs]
        return collate(pairs, views, taught)

    def estimated_positions(self, index: int) -> int:
        """Good enough to balance forwards, without reading the example: 13 positions a unit and about 3 of text."""
        return 16 * self.corpus.units[index] + 32

    # Checkpoints

    def save(self, place: Place, base: str = "") -> None:
        """Everything that a resumed run needs; the folder is also a PEFT adapter. All workers call it together and go
        on when it is there."""
        tensors = self.optimizer.state()
        with self.optimizer.whole():
            self._write(place, base, tensors)
        sum_over_workers([0.0])

    def _write(self, place: Place, base: str, tensors: dict[str, Tensor]) -> None:
        if world()[0] == 0:
            with place.writing(last=LAST) as folder:
                save_adapter(self.student.peft, folder, base=base)
                self.student.scope.write(folder)
                save_file(tensors, folder / "training.safetensors")
                state = {"done": self.done, "steps": len(self.steps), "config": dataclasses.asdict(self.config)}
                (folder / LAST).write_text(json.dumps(state, indent=1) + "\n")

    def load(self, place: Place) -> None:
        """Goes on from `save`. Raises ValueError if it was written under other settings or by another model."""
        state = json.loads((place / LAST).text())
        now = json.loads(json.dumps(dataclasses.asdict(self.config)))
        if differing := [k for k in now if state["config"].get(k) != now[k]]:
            raise ValueError(f"{place} was trained with another {', '.join(differing)}; start in an empty folder")
        if state["steps"] != len(self.steps):
            raise ValueError(f"{place} was trained on another corpus ({state['steps']} steps, now {len(self.steps)})")
        try:
            self.optimizer.load(load_file((place / "training.safetensors").local()), state["done"])
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error


def distill(
    language: Qwen3ForCausalLM,
    tokens: SpecialTokens,
    corpus: Corpus,
    out: str | Path,
    config: DistillConfig,
    *,
    teacher: TeacherStore | str | Path | Place | None = None,
    base: str = "",
    start_from: str | Path | None = None,
    wrap: Wrap = lambda student: student,
    zero: int | None = None,
    on_step: Callable[[StepLog, int], None] = lambda log, total: None,
    validate: Validate | None = None,
    on_validation: Callable[[dict[str, Any]], None] = lambda figures: None,
    checkpoint_seconds: float = 300.0,
    keep: int = 2,
    folder: RunFolder | None = None,
) -> Place:
    """Trains an adapter and returns where it is, `out`/adapter, which `PeftModel.from_pretrained` loads.

    `language` is the frozen base and is wrapped in place.  `out` (a path or URI, the same for all workers) gets what
    `RunFolder` says: a checkpoint every `checkpoint_seconds` and at each epoch's end, the newest `keep` of which stay.
    A run in the same `out` goes on from the newest.  `validate` is asked at each epoch's end, and the adapter with the
    lowest score is kept in `out`/best.  `base` is what the adapter's card calls its base model.  `start_from` is an
    earlier adapter that this one goes on from: short utterances first, then joined streams.
    """
    run_folder = folder or RunFolder(out)
    rank = world()[0]
    if isinstance(teacher, (str, Path, Place)):
        teacher = TeacherStore(teacher, model_hash(language, tokens))
    run = Distillation(language, tokens, corpus, config, teacher, wrap, start_from, zero)
    checkpoint = run_folder.newest()
    if checkpoint is not None:
        run.load(checkpoint)
    validated = [line for line in run_folder.lines("validation.jsonl") if line["step"] <= run.done]
    sum_over_workers([0.0])  # all have read what there is before anyone writes
    if rank == 0:
        run_folder.begin(run.done)
    saved = time.monotonic()
    while True:
        epoch = run.epoch_ended
        if validate is not None and epoch is not None and all(line["epoch"] != epoch for line in validated):
            assert checkpoint is not None
            validated.append({"epoch": epoch, "step": run.done, **validate(checkpoint)})
            if rank == 0:
                run_folder.append("validation.jsonl", validated[-1])
                if best_of(validated) is validated[-1]:
                    run_folder.keep_adapter(checkpoint, "best", **validated[-1])
                run_folder.publish()
            on_validation(validated[-1])
        if run.done == len(run.steps):
            break
        started = time.monotonic()
        log = dataclasses.replace(run.step(), seconds=time.monotonic() - started)
        if rank == 0:
            run_folder.append("log.jsonl", log_line(log))
        on_step(log, len(run.steps))
        due = rank == 0 and time.monotonic() - saved >= checkpoint_seconds
        if sum_over_workers([float(due)])[0] or run.epoch_ended is not None:  # all workers agree
            checkpoint = run_folder.checkpoint(run.done)
            run.save(checkpoint, base)
            if rank == 0:
                run_folder.publish()
                run_folder.prune(keep)
            saved = time.monotonic()
    if rank == 0:
        assert checkpoint is not None
        run_folder.keep_adapter(checkpoint, "adapter")
    sum_over_workers([0.0])
    return run_folder.place / "adapter"


def log_line(log: StepLog) -> dict[str, Any]:
    """Flat values of a step, for a log file or a dashboard. A unit is a second of audio."""
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
        "tokens_per_s": log.positions / log.seconds if log.seconds else 0.0,
        "audio_s_per_s": log.units / log.seconds if log.seconds else 0.0,
    }
