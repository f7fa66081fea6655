"""What every test has: one thread, fixed seeds, no network, one Ray for the whole run."""

from __future__ import annotations

import os

# Ray reads these when it is imported, the thread pools when they are made.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # niced workers may not start for minutes on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SEED = 20_26
SHARE_RAY = (
    *(f"tests/jobs/test_{name}.py" for name in ("prepare", "training_jobs")),
    *(f"tests/serve/test_{name}.py" for name in ("metrics", "monitoring", "rollout", "faults", "serve_app")),
)
"""Modules that are on Ray: one process has them all."""

torch.set_num_threads(1)
hypothesis.settings.register_profile("a2t", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("a2t")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is on Ray takes longest, so it comes first."""
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()) and not item.nodeid.startswith(SHARE_RAY):
            raise pytest.UsageError(f"{item.nodeid} is on Ray: name its module in SHARE_RAY of tests/conftest.py")
    items.sort(key=lambda item: not item.nodeid.startswith(SHARE_RAY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What `pytest -n 2` runs side by side: all that shares Ray stays in one process, and every other module is whole,
    so that its fixtures are made once."""
    from xdist.scheduler import LoadScopeScheduling

    class OneRay(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.split("::")[0]
            return "ray" if module.startswith(SHARE_RAY) else module

    return OneRay(config, log)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The same random numbers for a test whether it runs alone or last."""
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 -- libraries that draw from the global state
    torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The `ray` module, connected to a cluster of this machine alone. Starting takes seconds: one for the whole run.

    Give actors `num_cpus=0`, names of their own, and kill them (and delete Serve applications) at the end of a test.
    """
    os.environ.pop("RAY_ADDRESS", None)  # a cluster that happens to run here is not the test's
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=512 * 2**20,
    )
    yield ray
    if "ray.serve" in sys.modules:
        sys.modules["ray.serve"].shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of recorded reference outputs: $A2T_GOLDEN, or ../shared/golden beside this repository."""
    folder = Path(os.environ.get("A2T_GOLDEN") or ROOT.parent / "shared" / "golden")
    if not folder.is_dir():
        pytest.skip("no reference recordings here: set A2T_GOLDEN to their folder")
    return folder
