"""cluster/rayservice.yaml: what Serve reads of it, and KubeRay's own schema where that is at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

ROOT = Path(__file__).resolve().parents[2]
CRDS = Path(os.environ.get("A2T_CRDS") or ROOT.parent / "shared" / "crds")


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


def closed(schema: Any) -> Any:
    """As a server with strict validation reads it: a field that is not listed is an error."""
    if isinstance(schema, list):
        return [closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
    return inner


def test_kuberay_accepts_it(manifest: Any) -> None:
    path = CRDS / "ray.io_rayservices.yaml"
    if not path.is_file():
        pytest.skip("no KubeRay schemas here: set A2T_CRDS to the folder of its custom resource definitions")
    versions = yaml.safe_load(path.read_text())["spec"]["versions"]
    (schema,) = (closed(v["schema"]["openAPIV3Schema"]) for v in versions if v["name"] == "v1")
    schema["properties"]["metadata"] = {}  # Kubernetes' own
    validator = jsonschema.Draft7Validator(schema)
    assert [f"{list(e.path)}: {e.message}" for e in validator.iter_errors(manifest)] == []
    manifest["spec"]["serveConfigV3"] = ""
    assert not validator.is_valid(manifest)
