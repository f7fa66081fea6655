"""Where a model's files are: a folder as it stands, or a hub id, of which only the parts asked for are fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "scope.json")
ASIDE = ["*.json", "*.txt"]  # configuration, tokenizer, index: small, and needed to know what else is


def is_hub_id(path: str | Path) -> bool:
    """Whether `path` has the form of a hub id, such as `openbmb/MiniCPM-o-4_5`, and is no place on this machine."""
    name = str(path)
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/")) and _absent(name)


def locate(path: str | Path, parts: Sequence[str] = ("",)) -> Path:
    """The folder of a checkpoint.  `parts`: prefixes of the tensors that will be read; of a hub id, only the shards
    that hold them are fetched (() for none).  ValueError where there is no such folder, or the hub does not give it."""
    if not is_hub_id(path):
        return _folder(path)
    folder = _fetch(str(path), ASIDE)
    if not parts:
        return folder
    index = folder / INDEX
    shards = {SINGLE}
    if index.is_file():
        weights = weight_map(index)
        shards = {file for name, file in weights.items() if name.startswith(tuple(parts))}
    return _fetch(str(path), [*ASIDE, "adapter/*", *sorted(shards)])


def locate_adapter(path: str | Path) -> Path:
    """The folder of an adapter: as it stands, or a hub id's few files."""
    return _fetch(str(path), list(ADAPTER)) if is_hub_id(path) else _folder(path)


def read_json(path: Path) -> dict[str, Any]:
    """ValueError naming the file where it is missing, no JSON or no object."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}: a checkpoint's folder is expected")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{path} is no JSON ({error}): copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object: copy it again")
    return value


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard, of an index whose shards lie beside it."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{index} has no weight_map: copy it again")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} places {name} in {file!r}, which is no file beside it: copy it again")
    return files


def _absent(name: str) -> bool:
    return not Path(name).exists() and not Path(name).parent.is_dir()


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder that holds it")
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder, and it is no hub id (OWNER/NAME) either")
    return folder


def _fetch(name: str, patterns: list[str]) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name}: there is no such folder here, and the hub did not give a model of that id ({reason})"
        ) from error
