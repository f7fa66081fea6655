"""Reads the parts of a checkpoint that are asked for, memory-mapped, and says what is wrong with it.

A checkpoint is a folder (or a hub id) with config.json and safetensors: one `model.safetensors`, or shards with
`model.safetensors.index.json`.  Only tensors are read: nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Checkpoint:
    """An opened checkpoint: `folder`, `config` (its config.json) and which file holds which tensor."""

    def __init__(self, folder: Path, config: dict[str, Any], files: dict[str, str]) -> None:
        self.folder, self.config = folder, config
        self.files = files  # tensor name -> file name

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """A folder, or a hub id such as `openbmb/MiniCPM-o-4_5` (fetched into the hub's cache: its JSON and safetensors
        only).  ValueError naming the file that is missing or damaged."""
        folder = _locate(path)
        config = _read_json(folder / "config.json")
        if (folder / INDEX).is_file():
            files = _read_json(folder / INDEX).get("weight_map")
            if not isinstance(files, dict) or not files:
                raise ValueError(f"{folder / INDEX} has no weight_map: copy it again")
            absent = sorted(f for f in set(files.values()) if not (folder / f).is_file())
            if absent:
                raise ValueError(
                    f"{folder} lacks {absent[0]}, which its index names ({len(absent)} of {len(set(files.values()))} "
                    "shards are missing): download the checkpoint again"
                )
        elif (folder / SINGLE).is_file():
            with _reading(folder / SINGLE) as file:
                files = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}: it holds no weights in safetensors form")
        return cls(folder, config, files)

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self.files if name.startswith(prefix)]

    def describe(self, prefix: str = "") -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor under `prefix`, from the headers alone."""
        found = {}
        for file, names in self._by_file(self.names(prefix)).items():
            with _reading(self.folder / file) as opened:
                held = set(opened.keys())
                for name in names:
                    if name not in held:
                        raise ValueError(f"{self.folder / file} lacks {name}, which the index says it holds")
                    view = opened.get_slice(name)
                    if view.get_dtype() not in DTYPES:
                        raise ValueError(f"{name} in {self.folder / file} is of type {view.get_dtype()}: not supported")
                    found[name] = (tuple(view.get_shape()), DTYPES[view.get_dtype()])
        return found

    def tensors(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, memory-mapped, a file at a time."""
        for file, wanted in self._by_file(names).items():
            with _reading(self.folder / file) as opened:
                for name in wanted:
                    yield name, opened.get_tensor(name)

    def _by_file(self, names: list[str]) -> dict[str, list[str]]:
        grouped: dict[str, list[str]] = {}
        for name in names:
            grouped.setdefault(self.files[name], []).append(name)
        return grouped

    def problems(self, module: nn.Module, prefix: str, unused: frozenset[str] = frozenset()) -> list[str]:
        """What keeps the tensors under `prefix` from being those of `module`, one line a tensor, each to be read after
        the folder's name."""
        found = {n: shape for n, (shape, _) in self.describe(prefix).items() if n.removeprefix(prefix) not in unused}
        wanted = {prefix + name: tuple(t.shape) for name, t in module.state_dict().items()}
        if not found:
            return [f"has no tensor under {prefix!r}, so this part of the model is not in it"]
        lines = [f"lacks tensor {n}" for n in wanted if n not in found]
        lines += [f"has an unknown tensor {n}" for n in found if n not in wanted]
        return lines + [
            f"has tensor {n} of shape {list(found[n])} where config.json asks for {list(shape)}"
            for n, shape in wanted.items()
            if n in found and found[n] != shape
        ]

    def load_into(
        self,
        module: nn.Module,
        prefix: str,
        dtype: torch.dtype | None = None,
        device: str | torch.device | Mapping[str, str | int] = "cpu",
        unused: frozenset[str] = frozenset(),
    ) -> None:
        """Gives `module` (built on the meta device) the tensors under `prefix`, in their own dtype or in `dtype`.

        A tensor that needs no conversion and stays on the CPU is the mapped file itself.  `device`: one device, or a
        map from submodule names to devices, the longest name wins ("" for the rest).  `unused`: names after the prefix
        that are known and not wanted.  ValueError naming the first tensor that is missing, extra or misshapen.
        """
        problems = self.problems(module, prefix, unused)
        if problems:
            more = f" (and {len(problems) - 1} more such problems)" if len(problems) > 1 else ""
            raise ValueError(f"{self.folder} {problems[0]}{more}: config.json and the weights do not agree")
        wanted = {prefix + name for name in module.state_dict()}
        owners = {name: (owner, leaf) for name, owner, leaf in _leaves(module)}
        for name, tensor in self.tensors([n for n in self.names(prefix) if n in wanted]):
            owner, leaf = owners[name.removeprefix(prefix)]
            place = device_of(name.removeprefix(prefix), device)
            tensor = tensor.to(device=place, dtype=dtype if tensor.is_floating_point() else None)
            if leaf in owner._buffers:
                owner._buffers[leaf] = tensor
            else:
                owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def device_of(name: str, device: str | torch.device | Mapping[str, str | int]) -> str | int | torch.device:
    """Where tensor `name` goes."""
    if not isinstance(device, Mapping):
        return device
    fits = [key for key in device if key == "" or name == key or name.startswith(key + ".")]
    if not fits:
        raise ValueError(f"device_map places {', '.join(device)} and nothing places {name}: add an entry for it, or ''")
    return device[max(fits, key=len)]


def _leaves(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, owner in module.named_modules():
        for leaf in (*owner._parameters, *owner._buffers):
            yield f"{path}.{leaf}" if path else leaf, owner, leaf


def _locate(path: str | Path) -> Path:
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder that holds config.json and the safetensors")
    name = str(path)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"there is no folder {name}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"there is no folder {name}, and the hub did not give a model of that id: {reason}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}: a checkpoint's folder is expected")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object: copy it again")
    return value


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    with ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(path, "pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read as safetensors ({error}): truncated? download it again") from error
        yield file
