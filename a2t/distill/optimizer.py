"""AdamW over the adapter with warm-up and cosine decay, on one process or averaged over workers.

An `Optimizer` owns what is called (`module`: the student, or what averages its gradients) and what is updated, so that
the step does not know how many workers there are.  `a2t.distill.zero` has the one that shards.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from a2t.distill.config import DistillConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
ROWS = "trainable_tokens_delta"
"""Part of the names of the two token rows, in PEFT's layers."""

Wrap = Callable[[nn.Module], nn.Module]


def world() -> tuple[int, int]:
    """(rank, workers) of torch.distributed, (0, 1) without it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sum_over_workers(values: Sequence[float] | Tensor) -> list[float]:
    total = torch.as_tensor(values, dtype=torch.float64)
    if world()[1] > 1:
        if dist.get_backend() == "nccl":
            total = total.cuda()
        dist.all_reduce(total)
    return total.tolist()


def parameter_groups(named: dict[str, nn.Parameter], config: DistillConfig) -> list[dict[str, Any]]:
    """LoRA matrices, and the token rows with their own factor on the rate."""
    rows = [p for n, p in named.items() if ROWS in n]
    lora = [p for n, p in named.items() if ROWS not in n]
    assert len(rows) == 2 and lora
    return [{"params": lora, "factor": 1.0}, {"params": rows, "factor": config.rows_rate}]


def adamw(named: dict[str, nn.Parameter], config: DistillConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameter_groups(named, config), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
    )


class Optimizer:
    """Plain data parallelism: every worker holds everything. `wrap` puts the student into what averages gradients
    (DistributedDataParallel); one process needs none."""

    def __init__(
        self,
        student: nn.Module,
        named: dict[str, nn.Parameter],
        config: DistillConfig,
        total_steps: int,
        wrap: Wrap = lambda student: student,
    ):
        self.named, self.config, self.total_steps, self.done = named, config, total_steps, 0
        self.adam = adamw(named, config)
        self.student, self.module = student, wrap(student)

    def rate(self, step: int) -> float:
        """Learning rate of step `step` (from 0): linear warm-up, then a cosine to `final_rate` of the peak."""
        warm = math.ceil(self.config.warmup * self.total_steps)
        peak, last = self.config.learning_rate, self.config.final_rate
        if step < warm:
            return peak * (step + 1) / warm
        progress = min(1.0, (step - warm) / max(1, self.total_steps - warm))
        return peak * (last + (1 - last) * 0.5 * (1 + math.cos(math.pi * progress)))

    def backward(self, forward: Callable[[], tuple[Tensor, Tensor]], scale: float, last: bool) -> tuple[Tensor, Tensor]:
        """Runs a forward and adds the gradient of `scale` times its loss; workers are averaged with the `last` one."""
        waits = not last and self.module is not self.student
        with self.module.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            loss, terms = forward()
            (loss * scale).backward()
        return loss.detach(), terms

    def step(self) -> float:
        """Clips, updates, clears the gradients; returns the gradient's norm before clipping."""
        self._set_rate(self.adam.param_groups)
        parameters = [p for group in self.adam.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.config.clip))
        self._check(norm)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.done += 1
        return norm

    def _set_rate(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            group["lr"] = self.rate(self.done) * group["factor"]

    def _check(self, norm: float) -> None:
        if not math.isfinite(norm):
            raise FloatingPointError(f"step {self.done}: the gradient's norm is {norm}; nothing was updated")

    # What a checkpoint holds: whole tensors by name, whatever held them.

    def whole(self) -> contextlib.AbstractContextManager[Any]:
        """Within it what is trained can be read on every worker. All workers call it together."""
        return contextlib.nullcontext()

    def state(self) -> dict[str, Tensor]:
        """`param.`, `exp_avg.` and `exp_avg_sq.` of every trained parameter. All workers call it together."""
        out = {f"param.{n}": p.detach() for n, p in self.named.items()}
        for name, p in self.named.items():
            out |= {f"{key}.{name}": self.adam.state[p][key] for key in MOMENTS if p in self.adam.state}
        return {k: v.cpu().contiguous() for k, v in out.items()}

    def load(self, state: dict[str, Tensor], done: int) -> None:
        """Goes on after `done` steps. All workers call it together; ValueError if the tensors are another model's."""
        for name, p in self.named.items():
            if (found := state.get(f"param.{name}")) is None or found.shape != self.shape(p):
                raise ValueError(f"there is no fitting tensor for {name}: the checkpoint is of another model")
        self.done = done
        self._load(state)

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        return parameter.shape

    @torch.no_grad()
    def _load(self, state: dict[str, Tensor]) -> None:
        for name, p in self.named.items():
            p.copy_(state[f"param.{name}"])
            if self.done:
                moments = {key: state[f"{key}.{name}"].to(p) for key in MOMENTS}  # another number of workers' dtype
                self.adam.state[p] = {"step": torch.tensor(float(self.done)), **moments}
