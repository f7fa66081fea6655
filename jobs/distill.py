"""Trains the side channel's adapter: `python -m jobs.distill --data DIR --out RUN`.

DIR is what `jobs.precompute_teacher` wrote (same settings).  RUN/adapter is the result, a PEFT adapter that
`PeftModel.from_pretrained` loads; RUN/log.jsonl has each loss term of each step, RUN/tensorboard the same as curves.
The result is the same on any number of workers.  Workers that die go on from the last checkpoint; so does the whole
job when it is started again with the same options.

Without a cluster it runs on this machine; on one: `ray job submit --working-dir . -- python -m jobs.distill ...`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs._training import add_arguments, config_of, fit, load_base, parse, progress_bar


def work(job: dict[str, Any]) -> None:
    """One worker of the training loop."""
    import torch
    from ray import train
    from ray.train.torch import prepare_model
    from torch.utils.tensorboard import SummaryWriter

    from a2t.distill.recorded import open_recorded
    from a2t.distill.step import StepLog
    from a2t.distill.teacher import TeacherStore, model_hash
    from a2t.distill.train import distill, log_line
    from a2t.duplex.protocol import SpecialTokens

    torch.set_num_threads(job["threads"])
    first = train.get_context().get_world_rank() == 0
    config, data, out = config_of(job["settings"]), Path(job["data"]), Path(job["out"])
    model, language = load_base(job["model"], job["gpu"])
    tokens = SpecialTokens.from_lookup(model.tokenizer.token_id)
    store = None if job["live_teacher"] else TeacherStore(data / "teacher", model_hash(language, tokens))
    curves = SummaryWriter(str(out / "tensorboard")) if first else None
    bar = progress_bar(job, 0, "distill") if first else None

    def on_step(log: StepLog, total: int) -> None:
        if not first:
            return
        assert bar is not None and curves is not None
        bar.total = total
        terms = " ".join(f"{name} {value:.3f}" for name, value in log.terms.items())
        bar.set_description(f"loss {log.loss:.3f} ({terms})")
        bar.update(log.step - bar.n)
        for name, value in log_line(log).items():
            curves.add_scalar(f"train/{name}", value, log.step)

    def on_checkpoint(folder: Path, log: StepLog) -> None:
        checkpoint = train.Checkpoint.from_directory(str(folder)) if first else None
        train.report(log_line(log), checkpoint=checkpoint)
        if first:
            shutil.rmtree(folder)  # Ray's storage has it

    def run(resume_from: str | None) -> None:
        distill(
            language,
            tokens,
            open_recorded(data / "corpus"),
            out,
            config,
            teacher=store,
            base=model.name,
            start_from=job["start_from"],
            wrap=lambda student: prepare_model(student, move_to_device=False),
            on_step=on_step,
            on_checkpoint=on_checkpoint
            if job["workers"]
            else None,  # without workers the folder is what is gone on from
            resume_from=resume_from,
            checkpoint_seconds=job["checkpoint_seconds"],
        )

    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        run(None)
    else:
        with checkpoint.as_directory() as folder:
            run(folder)
    if curves is not None:
        curves.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.distill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--data", type=Path, help="what jobs.precompute_teacher wrote")
    parser.add_argument(
        "--no-distillation", action="store_true", help="only the transcription loss: the student to compare with"
    )
    parser.add_argument(
        "--live-teacher", action="store_true", help="run the teacher beside the student instead of reading its store"
    )
    parser.add_argument("--start-from", type=Path, help="an earlier adapter to go on from (default: a fresh one)")
    parser.add_argument("--checkpoint-seconds", type=float, default=120.0, help="time between two checkpoints")
    args = parse(parser, argv, required=["data", "out"])
    if not (args.data / "corpus").is_dir():
        parser.error(f"{args.data} has no corpus/: run jobs.precompute_teacher first")
    if args.no_distillation:
        args.settings = replace(args.settings, weights=args.settings.weights.without_distillation())
    if args.start_from is not None and not (args.start_from / "adapter_model.safetensors").is_file():
        parser.error(f"{args.start_from} holds no adapter_model.safetensors: --start-from takes an adapter's folder")
    args.start_from = args.start_from and args.start_from.resolve()
    args.data, args.out = args.data.resolve(), str(Path(args.out).resolve())
    if not fit(work, args, name="distill", storage=str(Path(args.out) / "ray")):
        return 1
    print(f"adapter: {Path(args.out) / 'adapter'}")
    print(f"curves:  tensorboard --logdir {Path(args.out) / 'tensorboard'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
