"""KubeRay's own schemas of its custom resources (version v1, KubeRay v1.7; Apache-2.0), as `tests/data/kuberay` has
them: compressed and without descriptions.

python -m tests.kuberay FOLDER       makes those files of `ray.io_*.yaml` in FOLDER
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

DATA = Path(__file__).parent / "data" / "kuberay"
KINDS = ("rayjobs", "rayservices")


def validator(kind: str) -> jsonschema.Draft7Validator:
    """Of manifests, as a server with strict validation reads them: a field that is not listed is an error."""
    schema = _closed(json.loads(gzip.decompress((DATA / f"{kind}.json.gz").read_bytes())))
    schema["properties"]["metadata"] = {}  # Kubernetes' own
    return jsonschema.Draft7Validator(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
    return inner


def original(folder: Path, kind: str) -> Any:
    text = (folder / f"ray.io_{kind}.yaml").read_text()
    versions = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1")
    return _short(schema)


def _short(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_short(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: _short(v) for k, v in schema.items() if not (k == "description" and isinstance(v, str))}


def main(folder: Path) -> None:
    for kind in KINDS:
        text = json.dumps(original(folder, kind), separators=(",", ":"), sort_keys=True)
        (DATA / f"{kind}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
