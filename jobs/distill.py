"""Trains the side channel's adapter: `python -m jobs.distill --data DIR --out RUN`.

DIR is what `jobs.precompute_teacher` wrote (same settings).  RUN/adapter is the result, a PEFT adapter that
`PeftModel.from_pretrained` loads, RUN/best the one that validated best; RUN/log.jsonl has each loss term of each step,
RUN/tensorboard the same as curves.  The result is the same on any number of workers, and whether they hold everything
(DDP) or shard it (--zero).  Workers that die go on from the last checkpoint; so does the whole job when it is started
again with the same options.  DIR and RUN are paths that all nodes see, or URIs (s3://...).

Without a cluster it runs on this machine; on one: `ray job submit --working-dir . -- python -m jobs.distill ...`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from a2t.distill.config import DistillConfig
from a2t.distill.place import Place, absolute
from jobs._training import add_arguments, config_of, fit, load_base, parse, progress_bar


def work(job: dict[str, Any]) -> None:
    """One worker of the training loop."""
    import torch
    from ray import train
    from ray.train.torch import prepare_model
    from torch.utils.tensorboard import SummaryWriter

    from a2t.distill.optimizer import world
    from a2t.distill.recorded import open_recorded
    from a2t.distill.run_folder import RunFolder
    from a2t.distill.step import StepLog
    from a2t.distill.teacher import TeacherStore, model_hash
    from a2t.distill.train import distill, log_line
    from a2t.duplex.protocol import SpecialTokens

    torch.set_num_threads(job["threads"])
    first = world()[0] == 0
    config, data, folder = config_of(job["settings"]), Place(job["data"]), RunFolder(job["out"])
    model, language = load_base(job["model"], job["gpu"])
    tokens = SpecialTokens.from_lookup(model.tokenizer.token_id)
    store = None if job["live_teacher"] else TeacherStore(data / "teacher", model_hash(language, tokens))
    bar = progress_bar(job, 0, "distill") if first else None
    curves: Any = None

    def on_step(log: StepLog, total: int) -> None:
        nonlocal curves
        if not first:
            return
        assert bar is not None
        if curves is None:  # what was drawn beyond the checkpoint goes
            curves = SummaryWriter(str(folder.local / "tensorboard"), purge_step=log.step, flush_secs=10)
        line = log_line(log)
        bar.total = total
        terms = " ".join(f"{name} {value:.3f}" for name, value in log.terms.items())
        rates = f"{line['audio_s_per_s']:.1f} audio s/s, {line['tokens_per_s']:.0f} tokens/s"
        bar.set_description(f"loss {log.loss:.3f} ({terms}) gradient {log.gradient_norm:.2f}, {rates}")
        bar.update(log.step - bar.n)
        for name, value in line.items():
            curves.add_scalar(f"train/{name}", value, log.step)

    def on_validation(figures: dict[str, Any]) -> None:
        if first and curves is not None:
            for name in figures.keys() - {"epoch", "step"}:
                curves.add_scalar(f"validation/{name}", figures[name], figures["step"])
        if first:
            told = ", ".join(f"{k} {v:.3f}" for k, v in figures.items() if k not in ("epoch", "step", "words"))
            print(f"epoch {figures['epoch'] + 1}: {told}", flush=True)

    distill(
        language,
        tokens,
        open_recorded(data / "corpus"),
        job["out"],
        config,
        teacher=store,
        base=model.name,
        start_from=job["start_from"],
        wrap=lambda student: prepare_model(student, move_to_device=False),
        zero=job["zero"],
        on_step=on_step,
        validate=validation(job) if job["validate"] else None,
        on_validation=on_validation,
        checkpoint_seconds=job["checkpoint_seconds"],
        folder=folder,
    )
    if curves is not None:
        curves.close()
        folder.publish()
    train.report({"done": 1})


def validation(job: dict[str, Any]) -> Any:
    """Streams the validation set under the adapter of a checkpoint, each worker its share of the rows."""
    from a2t.data.manifest import Manifest
    from a2t.distill.optimizer import sum_over_workers, world
    from a2t.distill.run_folder import local_adapter
    from a2t.eval.validation import Tally, tally

    rows = Manifest.read(job["validate"])[: job["validate_rows"]]

    def validate(checkpoint: Place) -> dict[str, float]:
        rank, workers = world()
        with local_adapter(checkpoint) as adapter:
            model, _ = load_base(job["model"], job["gpu"], adapter)
        mine = tally(model, job["validate"], rows[rank::workers], job["budget"])
        return Tally(*sum_over_workers(mine.counts())).figures()

    return validate


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.distill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--data", help="what jobs.precompute_teacher wrote: a path or URI")
    parser.add_argument(
        "--no-distillation", action="store_true", help="only the transcription loss: the student to compare with"
    )
    parser.add_argument(
        "--live-teacher", action="store_true", help="run the teacher beside the student instead of reading its store"
    )
    parser.add_argument("--start-from", help="an earlier adapter to go on from (default: a fresh one)")
    parser.add_argument("--checkpoint-seconds", type=float, default=120.0, help="time between two checkpoints")
    parser.add_argument(
        "--zero", type=int, choices=[2, 3], help="DeepSpeed's ZeRO: 2 shards the optimizer, 3 the frozen model too"
    )
    parser.add_argument("--validate", help="manifest of held-out rows: word errors and takeover at each epoch's end")
    parser.add_argument("--validate-rows", type=int, help="only so many of them")
    parser.add_argument("--budget", type=int, default=4000, help="the KV budget of validation")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = options()
    args = parse(parser, argv, required=["data", "out"])
    if args.zero and not args.workers.most:
        parser.error("--zero shards over workers: --workers of at least 1")
    args.settings = settings_of(args)
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    print(
        f"distill: {args.out}/log.jsonl has every step, {args.out}/validation.jsonl every epoch\n"
        f"distill: curves with: tensorboard --logdir {args.out}/tensorboard\n"
        "distill: the same command goes on where this one stopped",
        flush=True,
    )
    if not fit(work, args, name="distill", storage=f"{args.out}/ray"):
        return 1
    print(f"adapter: {args.out}/adapter" + (f", best: {args.out}/best" if args.validate else ""))
    return 0


def settings_of(args: argparse.Namespace) -> DistillConfig:
    if not args.no_distillation:
        return args.settings  # type: ignore[no-any-return]
    return replace(args.settings, weights=args.settings.weights.without_distillation())


def check(args: argparse.Namespace) -> None:
    """Makes paths absolute; ValueError for what is not there."""
    for name in ("data", "out", "start_from", "validate"):
        setattr(args, name, getattr(args, name) and absolute(getattr(args, name)))
    if not (Place(args.data) / "corpus").names():
        raise ValueError(f"{args.data} has no corpus/: run jobs.precompute_teacher first")
    if args.start_from is not None and not (Place(args.start_from) / "adapter_model.safetensors").is_file():
        raise ValueError(
            f"{args.start_from} holds no adapter_model.safetensors: --start-from takes an adapter's folder"
        )
    if args.validate is not None and not Place(args.validate).is_file():
        raise ValueError(f"{args.validate}: there is no such manifest")


if __name__ == "__main__":
    sys.exit(main())
