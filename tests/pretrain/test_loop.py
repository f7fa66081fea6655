import contextlib
import itertools
import json
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from a2t.pretrain.loop import Schedule, Workers, run_phase


class Stopped(Exception):
    pass


def train(folder: Path, stop_at: int | None = None) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)

    def loss(step: int, rng: Random) -> tuple[Tensor, dict[str, float]]:
        if step == stop_at:
            raise Stopped
        x = torch.tensor([[rng.gauss(0, 1) for _ in range(3)]])
        return (module(x) - x.sum()).square().mean(), {}

    run_phase("p", module, loss, Schedule(40, 1e-2, warmup=5), folder, Workers(), report_every=10, save_every=10)
    return module


def test_a_resumed_phase_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    with contextlib.suppress(Stopped):
        train(tmp_path / "broken", stop_at=25)
    resumed = train(tmp_path / "broken")
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    steps = [json.loads(line)["step"] for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert steps == [10, 20, 30, 40]
    again = train(tmp_path / "whole", stop_at=0)  # finished: nothing is trained, so nothing raises
    assert torch.equal(again.weight, whole.weight)


def test_the_schedule_warms_up_holds_and_decays() -> None:
    s = Schedule(100, 1.0, warmup=10, decay_from=0.5, floor=0.1)
    rates = [s.at(i) for i in range(100)]
    assert rates[0] == 0.1 and max(rates) == 1.0 and rates[20] == rates[49] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[50:])) and 0.1 <= rates[-1] < 0.11
