"""What the two training jobs share: settings from the command line and YAML, the model, Ray Train."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from a2t.distill.config import PRESETS, DistillConfig, with_overrides
from a2t.distill.place import Place

EMBEDDED = "embedded"


@dataclass(frozen=True)
class Workers:
    """How few and how many."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Workers:
        least, _, most = str(text).partition(":")
        try:
            found = cls(int(least), int(most or least))
        except ValueError:
            found = cls(-1, -1)
        if found.least < 0 or found.most < found.least or (found.most > found.least and not found.least):
            raise argparse.ArgumentTypeError(f"{text!r} is neither a number of workers nor MIN:MAX of at least 1")
        return found

    @property
    def asked(self) -> int | tuple[int, int]:
        return self.least if self.least == self.most else (self.least, self.most)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of both jobs."""
    parser.add_argument(
        "--config", type=Path, help="YAML with any of these options by name, and `settings:` as for --set"
    )
    parser.add_argument(
        "--model",
        default=EMBEDDED,
        help="'embedded', a folder of that form, a MiniCPM-o 4.5 checkpoint's, or a hub id",
    )
    parser.add_argument("--out", help="where results go; started again with the same --out, the job goes on")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="settings to start from (default: embedded / paper)")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="changes one setting, e.g. epochs=2 or eviction.high=2000 (a2t/distill/config.py lists them)",
    )
    parser.add_argument(
        "--workers",
        type=Workers.parse,
        default=Workers(2, 2),
        metavar="N or MIN:MAX",
        help="Ray Train workers, or how few and how many as nodes come and go; 0 runs in this process",
    )
    parser.add_argument("--gpu", action="store_true", help="one GPU a worker (default: CPU, gloo)")
    parser.add_argument("--threads", type=int, default=1, help="threads a CPU worker computes with")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, required: Sequence[str]) -> argparse.Namespace:
    """Command line over YAML over defaults; `settings` becomes a DistillConfig. Ends with a message on bad input."""
    args = parser.parse_args(argv)
    changes: dict[str, Any] = {}
    try:
        if args.config is not None:
            changes = _apply_yaml(parser, args, argv)
        for pair in args.settings:
            _put(changes, pair)
        args.preset = args.preset or ("embedded" if args.model == EMBEDDED else "paper")
        if args.gpu:
            changes = {"autocast": "bfloat16", "gradient_checkpointing": True} | changes
        args.settings = with_overrides(PRESETS[args.preset], changes)
    except (OSError, ValueError, argparse.ArgumentTypeError, yaml.YAMLError) as error:
        parser.error(str(error))
    if missing := [name for name in required if getattr(args, name) is None]:
        parser.error("the job needs " + ", ".join("--" + name.replace("_", "-") for name in missing))
    if args.threads < 1:
        parser.error("--threads is at least 1")
    return args


def _apply_yaml(
    parser: argparse.ArgumentParser, args: argparse.Namespace, argv: Sequence[str] | None
) -> dict[str, Any]:
    values = yaml.safe_load(args.config.read_text()) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{args.config} is not a mapping of options")
    settings = values.pop("settings", {})
    known = {a.dest for a in parser._actions} - {"help", "config"}
    if unknown := [k for k in values if k.replace("-", "_") not in known]:
        raise ValueError(f"{args.config}: there is no option {', '.join(map(repr, unknown))}")
    values = {k.replace("-", "_"): v for k, v in values.items()}
    types = {a.dest: a.type for a in parser._actions if callable(a.type)}
    parser.set_defaults(**{k: types[k](v) if k in types and v is not None else v for k, v in values.items()})
    given = parser.parse_args(argv)  # the command line wins
    vars(args).update(vars(given))
    if not isinstance(settings, dict):
        raise ValueError(f"{args.config}: `settings` is {settings!r}, not a mapping")
    return settings


def _put(changes: dict[str, Any], pair: str) -> None:
    name, equals, text = pair.partition("=")
    if not equals:
        raise ValueError(f"--set {pair!r}: NAME=VALUE is needed")
    *groups, last = name.split(".")
    for group in groups:
        changes = changes.setdefault(group, {})
    changes[last] = yaml.safe_load(text)


def config_of(values: dict[str, Any]) -> DistillConfig:
    """Settings that travelled to a worker as plain values."""
    return with_overrides(DistillConfig(), {k: v for k, v in values.items() if v != getattr(DistillConfig(), k)})


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """Options as JSON values, for workers."""
    out = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    return {
        **out,
        "workers": args.workers.most,
        "settings": dataclasses.asdict(args.settings),
        "terminal": sys.stderr.isatty(),
    }


class Lines:
    """A bar's stand-in where output goes to a file: a line now and then."""

    def __init__(self, total: int, desc: str, every_s: float = 20.0):
        self.total, self.desc, self.n = total, desc, 0
        self.every_s, self.printed = every_s, time.monotonic()

    def set_description(self, desc: str) -> None:
        self.desc = desc

    def update(self, n: int) -> None:
        self.n += n
        if self.n == self.total or time.monotonic() - self.printed >= self.every_s:
            self.printed = time.monotonic()
            sys.stdout.write(f"{self.desc}: {self.n}/{self.total}\n")
            sys.stdout.flush()

    def close(self) -> None: ...


def progress_bar(job: dict[str, Any], total: int, desc: str, position: int = 0) -> Any:
    """A bar that a worker moves and the driver's terminal shows; lines if there is no terminal."""
    if not job["terminal"]:
        return Lines(total, desc)
    from ray.experimental import tqdm_ray

    return tqdm_ray.tqdm(total=total, desc=desc, position=position)


def load_base(model: str, gpu: bool, adapter: Path | None = None) -> tuple[Any, Any]:
    """The frozen duplex model and its language model (a stock Qwen3ForCausalLM), with rows for the side channel; or
    the same with an adapter, to be streamed.

    `model`: 'embedded', a folder of that form, a MiniCPM-o checkpoint's, or a hub id.  ValueError if it is none.
    """
    import torch

    from a2t.models.loading import load_model

    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    loaded = load_model(model, adapter, device=device, side_channel=True)
    return loaded, loaded.lm if adapter is None else None


WAIT_S = 6 * 3600
"""How long workers wait for one another: one may have an hour more to record than another."""
MAX_FAILURES = 8
"""How often a run is begun again after a worker or node was lost; its work is on disk."""


def fit(work: Callable[[dict[str, Any]], None], args: argparse.Namespace, name: str, storage: str) -> bool:
    """Runs `work` on Ray Train workers: on the cluster that RAY_ADDRESS names, else on one of this machine alone.

    Workers that die are started again, and go on from what is on disk; what a worker refuses (ValueError) is not tried
    again.  Returns whether it went through; what stopped it is printed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it shows every line of a worker twice
    alone = "RAY_ADDRESS" not in os.environ
    if alone:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nobody else can reach a cluster of one process tree
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

    if args.workers.most and not ray.is_initialized():
        threads = {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
        options: dict[str, Any] = {"runtime_env": {"env_vars": threads}}
        if alone:
            cpus = max(os.cpu_count() or 1, args.workers.most)
            options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        context = ray.init(**options)
        if context.dashboard_url:
            print(f"{name}: dashboard at http://{context.dashboard_url}")
    refusal = Place(storage) / "refused"
    refusal.remove()
    trainer = TorchTrainer(
        _once_refused(work, str(refusal)),
        train_loop_config=plain(args),
        torch_config=TorchConfig(backend="nccl" if args.gpu else "gloo", timeout_s=WAIT_S),
        scaling_config=ScalingConfig(num_workers=args.workers.asked, use_gpu=args.gpu),
        run_config=RunConfig(
            name=name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=MAX_FAILURES),
        ),
    )
    try:
        trainer.fit()
    except WorkerGroupError as failure:
        for rank, error in sorted(failure.worker_failures.items()):
            print(f"{name}: worker {rank} failed: {_reason(error)}", file=sys.stderr)
        return False
    except (TrainingFailedError, ValueError) as failure:  # without workers a ValueError comes as it is
        print(f"{name}: {failure}", file=sys.stderr)
        return False
    if refusal.is_file():
        print(f"{name}: {refusal.text()}", file=sys.stderr)
        return False
    return True


def _once_refused(work: Callable[[dict[str, Any]], None], note: str) -> Callable[[dict[str, Any]], None]:
    """`work`, which Ray Train begins again whatever stopped it: but it does nothing after a ValueError, which it notes
    for the driver."""

    def begin(job: dict[str, Any]) -> None:
        refusal = Place(note)
        if refusal.is_file():
            return
        try:
            work(job)
        except ValueError as error:
            refusal.write_text(str(error))
            raise

    return begin


def _reason(error: BaseException) -> str:
    """The worker's own error: a ValueError is told in its words, anything else with its traceback."""
    cause = getattr(error, "_base_exc", None) or error.__cause__ or error
    return str(cause) if isinstance(cause, ValueError) else "".join(traceback.format_exception(error))
