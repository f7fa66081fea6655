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

STAGES = (2, 3)


class ZeroOptimizer(Optimizer):
    """Needs torch.distributed. Raises ValueError where DeepSpeed is not installed."""

    def __init__(
        self, student: nn.Module, named: dict[str, nn.Parameter], config: DistillConfig, total_steps: int, stage: int
    ):
        deepspeed = _deepspeed()
        os.environ.setdefault("LOCAL_RANK", "0")  # launchers and Ray Train set it; without either there is one machine
        self.named, self.config, self.total_steps, self.done = named, config, total_steps, 0
        self.student, self.stage = student, stage
        adam = adamw(named, config)
        for group in adam.param_groups:
            group["lr"] = 0.0  # stage 3 takes a step without gradients to make Adam's moments
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
        self.engine, self.sharded, *_ = deepspeed.initialize(
            model=student, optimizer=adam, config=settings, dist_init_required=False
        )
        self.adam, self.module = self.sharded.optimizer, self.engine
        self._count(0)

    def _count(self, done: int) -> None:
        """Adam's own count of steps, which sets its bias correction."""
        for held in self.adam.state.values():
            held["step"] = torch.tensor(float(done))

    def _link(self) -> None:
        """Stage 2 looks for the moments of all groups when the first one has been updated, and never again."""
        if self.stage != 2:
            return
        for group in self.adam.param_groups:
            for flat in group["params"]:
                if not self.adam.state[flat]:
                    moments = {key: torch.zeros_like(flat) for key in MOMENTS}
                    self.adam.state[flat] = {"step": torch.tensor(0.0), **moments}
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
        self._link()
        for name, p in self.named.items():
            out[f"param.{name}"] = safe_get_full_fp32_param(p)
            for key in MOMENTS if self.done else ():
                out[f"{key}.{name}"] = safe_get_full_optimizer_state(p, key)
        whole = {k: v.view(self.shape(self.named[k.partition(".")[2]])) for k, v in out.items()}
        return {k: v.detach().cpu().clone() for k, v in whole.items()}

    @torch.no_grad()
    def _load(self, state: dict[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        self._link()
        for name, p in self.named.items():
            safe_set_full_fp32_param(p, state[f"param.{name}"].to(p.device))
            p.data.copy_(state[f"param.{name}"])  # whole on every worker: see the threshold above
            for key in MOMENTS if self.done else ():
                safe_set_full_optimizer_state(p, state[f"{key}.{name}"].to(p.device), key)
        self._count(self.done)


def gathered(*parameters: nn.Parameter) -> contextlib.AbstractContextManager[Any]:
    """Within it the parameters are whole: stage 3 leaves each worker a part of them."""
    if not any(hasattr(p, "ds_id") for p in parameters):
        return contextlib.nullcontext()
    return _deepspeed().zero.GatheredParameters(list(parameters))


def _deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError("DeepSpeed is not installed: pip install 'a2t[zero]', or leave ZeRO out") from error
    # On the CPU it would compile an all-reduce of its own at the first use, for which gloo is good enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
