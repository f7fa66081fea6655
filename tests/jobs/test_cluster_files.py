"""cluster/: the training job's files are what Ray's launcher, KubeRay and the job itself accept."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from jobs import distill
from jobs._training import parse
from tests import kuberay

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"


@pytest.fixture
def manifest() -> Any:
    return yaml.safe_load((CLUSTER / "rayjob-distill.yaml").read_text())


def test_the_launcher_accepts_its_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((CLUSTER / "gpu-cluster.yaml").read_text()))
    validate_config(config)
    assert config["docker"]["image"].startswith(f"rayproject/ray:{ray.__version__}-")
    gpus = config["available_node_types"]["eight-gpus"]
    assert gpus["resources"]["GPU"] * gpus["max_workers"] >= options().workers.most
    config["available_node_types"]["eight-gpus"]["min_wrokers"] = 1
    with pytest.raises(Exception, match="min_wrokers"):
        validate_config(config)


def options() -> argparse.Namespace:
    return parse(distill.options(), ["--config", str(CLUSTER / "distill.yaml")], ["data", "out"])


def test_the_jobs_options_are_the_jobs() -> None:
    args = options()
    assert args.gpu and args.workers.asked == (8, 16)
    assert args.settings.autocast == "bfloat16" and args.settings.gradient_checkpointing
    assert args.settings.global_batch == 16 and args.settings.max_seconds is None


def test_the_rayjob_says_what_the_job_needs(manifest: Any) -> None:
    spec = manifest["spec"]
    python, flag, module, *words = shlex.split(spec["entrypoint"])
    assert (python, flag, module) == ("python", "-m", "jobs.distill")
    assert (ROOT / words[words.index("--config") + 1]).is_file()
    assert spec["backoffLimit"] >= 1, "a retry is what resumes the run"
    assert spec["rayClusterSpec"]["rayVersion"] == ray.__version__
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    asked = options().workers
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert workers["minReplicas"] * gpus >= asked.least and workers["maxReplicas"] * gpus >= asked.most


def test_kuberay_accepts_the_rayjob(manifest: Any) -> None:
    validator = kuberay.validator("rayjobs")
    assert [f"{list(e.path)}: {e.message}" for e in validator.iter_errors(manifest)] == []
    manifest["spec"]["backofLimit"] = 1
    assert not validator.is_valid(manifest)
