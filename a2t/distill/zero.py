"""DeepSpeed's ZeRO around the student: stage 2 shards gradients and Adam's moments, stage 3 the frozen weights as well.

For LoRA on a large base it is stage 3 that counts: the base is spread over the workers and gathered layer by layer.
Checkpoints hold whole tensors, as without sharding, so a run may go on with another stage or number of workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from a2t.distill.config import DistillConfig
from a2t.distill.optimizer import MOMENTS, Optimizer, adamw
from a2t.distill.step import Student

STAGES = (2, 3)


class ZeroOptimizer(Optimizer):
    """Needs torch.distributed. Raises ValueError where DeepSpeed is not installed."""

    def __init__(
        self, student: Student, named: dict[str, nn.Parameter], config: DistillConfig, total_steps: int, stage: int
    ):
        deepspeed = _deepspeed()
        os.environ.setdefault("LOCAL_RANK", "0")  # launchers and Ray Train set it; without either there is one machine
        self.named, self.config, self.total_steps, self.done = named, config, total_steps, 0
        self.student, self.stage = student, stage
        adam = adamw(named, config)
        # Everything trained is small and is read outside of its module's forward: it stays whole.
        largest = max(p.numel() for p in named.values())
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # steps are cut into forwards by us
            "gradient_accumulation_steps": 1,
            "gradient_clipping": config.clip,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": largest + 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 2**31,
        }
        if stage == 3:  # done here and not within `initialize`, which refuses float64
            deepspeed.zero.Init(module=student, config_dict_or_path=settings, dtype=torch.float32)
            for matrix in student.read_outside:
                deepspeed.zero.register_external_parameter(student, matrix)
        self.engine, self.sharded, *_ = deepspeed.initialize(
            model=student, optimizer=adam, config=settings, dist_init_required=False
        )
        self.adam, self.module = self.sharded.optimizer, self.engine
        self._count(0)

    def _count(self, done: int) -> None:
        """Adam's own count of steps, which sets its bias correction."""
        for held in self.adam.state.values():
            held["step"] = torch.tensor(float(done))

    def _make_moments(self) -> None:
        """Adam makes its moments with the first step; they are read and set before it as well."""
        flats = self.sharded.fp32_partitioned_groups_flat if self.stage == 3 else _parameters(self.adam)
        for flat in flats:
            if not self.adam.state[flat]:
                moments = {key: torch.zeros_like(flat) for key in MOMENTS}
                self.adam.state[flat] = {"step": torch.tensor(0.0), **moments}
        if self.stage == 2:  # it looks for all moments when the first of them has been updated, and never again
            self.sharded._hp_optimizer_states_linked = False
            self.sharded._lazy_init_hp_params_optimizer_state()

    def backward(self, forward: Callable[[], tuple[Tensor, Tensor]], scale: float, last: bool) -> tuple[Tensor, Tensor]:
        self.engine.set_gradient_accumulation_boundary(last)
        loss, terms = forward()
        self.engine.backward(loss * scale)
        return loss.detach(), terms

    def step(self) -> float:
        self._set_rate(self.sharded.param_groups)
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        self._check(norm)
        self.done += 1
        return norm

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)

    def state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        out = {}
        self._make_moments()
        for name, p in self.named.items():
            out[f"param.{name}"] = safe_get_full_fp32_param(p)
            for key in MOMENTS if self.done else ():
                out[f"{key}.{name}"] = safe_get_full_optimizer_state(p, key)
        whole = {k: v.view(self.shape(self.named[k.partition(".")[2]])) for k, v in out.items()}
        return {k: v.detach().cpu().clone() for k, v in whole.items()}

    def whole(self, change: bool = False) -> contextlib.AbstractContextManager[Any]:
        gathered = _deepspeed().zero.GatheredParameters
        return gathered(list(self.named.values()), modifier_rank=0 if change else None)

    @torch.no_grad()
    def _load(self, state: dict[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        self._make_moments()
        with self.whole(change=True):
            for name, p in self.named.items():
                p.copy_(state[f"param.{name}"])
        for name, p in self.named.items():  # the optimizer's own copies
            safe_set_full_fp32_param(p, state[f"param.{name}"].to(p.device))
            for key in MOMENTS if self.done else ():
                safe_set_full_optimizer_state(p, state[f"{key}.{name}"].to(p.device), key)
        self._count(self.done)


def _parameters(adam: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in adam.param_groups for p in group["params"]]


def _deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError("DeepSpeed is not installed: pip install 'a2t[zero]', or leave ZeRO out") from error
    # On the CPU it would compile an all-reduce of its own at the first use, for which gloo is good enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
