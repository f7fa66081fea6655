"""cluster/rayservice.yaml: what Serve reads of it, and what KubeRay's own schema says of it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tests import kuberay

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def manifest() -> Any:
    return yaml.safe_load((ROOT / "cluster" / "rayservice.yaml").read_text())


def test_serve_and_the_application_accept_what_it_says(manifest: Any) -> None:
    import ray

    from serve_apps.app import AppArgs, app

    config = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == f"{app.__module__}:{app.__name__}"
    args = AppArgs.model_validate(application.args)
    assert args.max_engines is not None
    cluster = manifest["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == ray.__version__
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert args.num_cpus <= float(container["resources"]["requests"]["cpu"])
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] >= args.drain_s + 60
    assert manifest["spec"]["rayClusterDeletionDelaySeconds"] > 60


def test_kuberay_accepts_it(manifest: Any) -> None:
    validator = kuberay.validator("rayservices")
    assert [f"{list(e.path)}: {e.message}" for e in validator.iter_errors(manifest)] == []
    manifest["spec"]["serveConfigV3"] = ""
    assert not validator.is_valid(manifest)


@pytest.mark.parametrize("kind", kuberay.KINDS)
def test_the_copies_of_the_schemas_are_kuberay_s(kind: str) -> None:
    folder = Path(os.environ.get("A2T_CRDS") or ROOT.parent / "shared" / "crds")
    if not folder.is_dir():
        pytest.skip("no custom resource definitions of KubeRay here: set A2T_CRDS to their folder")
    copy = json.loads(gzip.decompress((kuberay.DATA / f"{kind}.json.gz").read_bytes()))
    assert copy == kuberay.original(folder, kind)
