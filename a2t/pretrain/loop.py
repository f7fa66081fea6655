"""One training phase: schedule, data-parallel gradients, checkpoints, a log. Phases are counted in steps, not minutes,
so that the same seed makes the same model whatever the machine's speed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, flat, then cosine decay to `floor` of the peak learning rate."""

    steps: int
    lr: float
    warmup: int = 50
    decay_from: float = 0.4
    floor: float = 0.03

    def at(self, step: int) -> float:
        progress = step / self.steps
        if progress < self.decay_from:
            decay = 1.0
        else:
            angle = math.pi * (progress - self.decay_from) / (1 - self.decay_from)
            decay = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(angle))
        return self.lr * min(1.0, (step + 1) / self.warmup) * decay


@dataclass(frozen=True)
class Workers:
    rank: int = 0
    size: int = 1

    @property
    def lead(self) -> bool:
        return self.rank == 0


Loss = Callable[[int, Random], tuple[Tensor, dict[str, float]]]
"""(step, this worker's random numbers for this step) -> loss and figures to log (means are taken over steps)."""


def run_phase(
    name: str,
    module: nn.Module,
    loss: Loss,
    schedule: Schedule,
    folder: Path,
    workers: Workers,
    seed: int = 0,
    report_every: int = 50,
    save_every: int = 200,
    evaluate: Callable[[], dict[str, float]] | None = None,
    evaluate_every: int = 500,
) -> None:
    """Trains `module` in place, matrix products in bfloat16. Resumes from folder/name.pt; a finished phase returns at
    once."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=schedule.lr, betas=(0.9, 0.98), fused=True)
    path, start = folder / f"{name}.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    module.train()
    figures: dict[str, list[float]] = {}
    began = time.perf_counter()
    bar = tqdm(range(start, schedule.steps), initial=start, total=schedule.steps, desc=name, disable=not workers.lead)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = schedule.at(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value, seen = loss(step, Random(f"{seed}/{name}/{step}/{workers.rank}"))
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        _average_gradients(parameters, workers)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        for key, figure in {"loss": float(value.detach()), "gradient_norm": float(norm), **seen}.items():
            if not math.isnan(figure):
                figures.setdefault(key, []).append(figure)
        done = step + 1
        if workers.lead and (done % report_every == 0 or done == schedule.steps):
            means = {k: sum(v) / len(v) for k, v in figures.items()}
            record = {"phase": name, "step": done, "seconds": time.perf_counter() - began, **means}
            if evaluate and (done % evaluate_every == 0 or done == schedule.steps):
                module.eval()
                record |= evaluate()
                module.train()
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            bar.set_postfix({k: f"{v:.3f}" for k, v in record.items() if isinstance(v, float)})
            figures.clear()
        if workers.lead and (done % save_every == 0 or done == schedule.steps):
            state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save(state, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
    module.eval()
    if workers.size > 1:
        dist.barrier()


def _average_gradients(parameters: list[nn.Parameter], workers: Workers) -> None:
    """One all-reduce over all gradients: cheaper on a loopback than one a tensor."""
    if workers.size == 1:
        return
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    dist.all_reduce(flat)
    flat /= workers.size
    at = 0
    for p in parameters:
        assert p.grad is not None
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()
