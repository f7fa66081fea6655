"""What the suites of jobs.evaluate share: where weights are, and streaming many tasks in processes of their own."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from a2t.eval.streaming import System

EMBEDDED = Path(__file__).parents[1] / "a2t" / "models" / "embedded"

_tell: Callable[[], object] | None = None


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


def weights(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*config.json")])


def start_worker(progress: Any) -> None:
    """One thread a process: more of them only spin on each other."""
    import torch

    torch.set_num_threads(1)
    globals()["_tell"] = lambda: progress.put(1)


def unit_done() -> None:
    """`work` tells that a unit is through."""
    if _tell is not None:
        _tell()


class Streamed(Protocol):
    @property
    def units(self) -> int: ...


Task = TypeVar("Task", bound=Streamed)


def run_tasks(tasks: Sequence[Task], work: Callable[[Task], None], workers: int) -> None:
    """Streams every task, shows a bar over units; the first failure ends it, what is finished stays.

    Without workers: in this process.
    """
    from tqdm import tqdm

    bar = tqdm(total=sum(t.units for t in tasks), unit="unit", desc=f"{len(tasks)} streams", smoothing=0.05)
    if not workers:
        globals()["_tell"] = bar.update
        with bar:
            for task in tasks:
                work(task)
        return
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        progress = manager.Queue()
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
