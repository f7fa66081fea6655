"""Reads the parts of a checkpoint that are asked for, memory-mapped, and says what is wrong with it.

A checkpoint is a folder (or a hub id) with config.json and safetensors: one `model.safetensors`, or shards with
`model.safetensors.index.json`.  Only tensors are read: nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn

from a2t.models.hub import INDEX, SINGLE, locate, read_json, weight_map

WEIGHTS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
OTHERS = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPES = WEIGHTS | OTHERS

Place = str | int | torch.device


class Checkpoint:
    """An opened checkpoint: `folder`, `config` (its config.json) and which file holds which tensor."""

    def __init__(self, folder: Path, config: dict[str, Any], files: dict[str, str]) -> None:
        self.folder, self.config = folder, config
        self.files = files  # tensor name -> file name

    @classmethod
    def open(cls, path: str | Path, parts: Sequence[str] = ("",)) -> Checkpoint:
        """A folder, or a hub id such as `openbmb/MiniCPM-o-4_5` (fetched into the hub's cache).

        `parts`: prefixes of the tensors that will be read; files without any of them need not be there.  ValueError
        naming the file that is missing or damaged.
        """
        folder = locate(path, parts)
        config = read_json(folder / "config.json")
        if (folder / SINGLE).is_file():
            with _reading(folder / SINGLE) as file:
                return cls(folder, config, dict.fromkeys(file.keys(), SINGLE))
        if not (folder / INDEX).is_file():
            raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}: it holds no weights in safetensors form")
        files = weight_map(folder / INDEX)
        wanted = {file for name, file in files.items() if name.startswith(tuple(parts))}
        if absent := sorted(file for file in wanted if not (folder / file).is_file()):
            raise ValueError(
                f"{folder} lacks {absent[0]}, which its index names ({len(absent)} of {len(wanted)} shards are "
                "missing): download the checkpoint again"
            )
        return cls(folder, config, files)

    @property
    def where(self) -> str:
        """Its config.json, for messages."""
        return f"{self.folder}/config.json"

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self.files if name.startswith(prefix)]

    def describe(self, prefix: str = "") -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor under `prefix`, from the headers alone.  ValueError where an index and its
        shards do not agree."""
        found = {}
        for file, names in self._by_file(self.names(prefix)).items():
            with _reading(self.folder / file) as opened:
                held = {name for name in opened.keys() if name.startswith(prefix)}  # noqa: SIM118
                if lacking := [name for name in names if name not in held]:
                    raise ValueError(f"{self.folder / file} lacks {lacking[0]}, which the index says it holds")
                if unnamed := sorted(held.difference(names)):
                    raise ValueError(f"{self.folder / file} holds {unnamed[0]}, which the index does not place there")
                for name in names:
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

    def problems(
        self, module: nn.Module, prefix: str, unused: frozenset[str] = frozenset(), dtype: torch.dtype | None = None
    ) -> list[str]:
        """What keeps the tensors under `prefix` from being those of `module`, one line a tensor, each to be read after
        the folder's name.  `dtype`: as they will be loaded, None for their own, which must then be one for all."""
        found = {n: facts for n, facts in self.describe(prefix).items() if n.removeprefix(prefix) not in unused}
        wanted = {prefix + name: tuple(t.shape) for name, t in module.state_dict().items()}
        if not found:
            return [f"has no tensor under {prefix!r}, so this part of the model is not in it"]
        lines = [f"lacks tensor {n}" for n in wanted if n not in found]
        lines += [f"has an unknown tensor {n}" for n in found if n not in wanted]
        both = {n: (*found[n], shape) for n, shape in wanted.items() if n in found}
        lines += [
            f"has tensor {n} of shape {list(held)} where config.json asks for {list(shape)}"
            for n, (held, _, shape) in both.items()
            if held != shape
        ]
        strange = [(n, kind) for n, (_, kind, _) in both.items() if kind not in WEIGHTS.values()]
        lines += [f"has tensor {n} of type {_short(kind)}: weights are {', '.join(WEIGHTS)}" for n, kind in strange]
        kinds = Counter(kind for _, kind, _ in both.values())
        if dtype is None and not strange and len(kinds) > 1:
            usual = kinds.most_common(1)[0][0]
            lines += [
                f"has tensor {n} in {_short(kind)} and most others in {_short(usual)}: ask for one type, as with "
                f"--dtype, if that is meant ({len(both)} tensors)"
                for n, (_, kind, _) in both.items()
                if kind != usual
            ]
        return lines

    def require(
        self, module: nn.Module, prefix: str, unused: frozenset[str] = frozenset(), dtype: torch.dtype | None = None
    ) -> None:
        """ValueError naming the first of the `problems`, if there are any."""
        if problems := self.problems(module, prefix, unused, dtype):
            more = f" (and {len(problems) - 1} more such problems)" if len(problems) > 1 else ""
            raise ValueError(f"{self.folder} {problems[0]}{more}: config.json and the weights do not agree")

    def load_into(
        self,
        module: nn.Module,
        prefix: str,
        dtype: torch.dtype | None = None,
        device: Place | Mapping[str, str | int] = "cpu",
        unused: frozenset[str] = frozenset(),
    ) -> None:
        """Gives `module` (built on the meta device) the tensors under `prefix`, in their own dtype or in `dtype`.

        A tensor that needs no conversion and stays on the CPU is the mapped file itself.  `device`: one device, or a
        map from submodule names to devices, the longest name wins ("" for the rest).  `unused`: names after the prefix
        that are known and not wanted.  ValueError naming the first tensor that is missing, extra, misshapen, of a type
        that weights do not have, or holds values that are not numbers.
        """
        self.require(module, prefix, unused, dtype)
        wanted = {prefix + name for name in module.state_dict()}
        owners = {name: (owner, leaf) for name, owner, leaf in _leaves(module)}
        for name, tensor in self.tensors([n for n in self.names(prefix) if n in wanted]):
            owner, leaf = owners[name.removeprefix(prefix)]
            tensor = tensor.to(device=device_of(name.removeprefix(prefix), device), dtype=dtype)
            self.check_finite(name, tensor)
            if leaf in owner._buffers:
                owner._buffers[leaf] = tensor
            else:
                owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)

    def check_finite(self, name: str, tensor: Tensor) -> None:
        """ValueError where `tensor` holds a NaN or an infinity, which one sum over it shows."""
        if not tensor.is_meta and not tensor.sum(dtype=torch.float32).isfinite():
            raise ValueError(
                f"{self.folder / self.files[name]}: {name} holds values that are not finite numbers: download it again"
            )


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json. ValueError naming it where it is missing or damaged."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json: download the checkpoint again")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read as a tokenizer ({reason}): download it again") from error


def whole(values: Mapping[str, Any], name: str, where: str) -> int:
    """Setting `name`, a positive whole number.  ValueError naming it and `where` it stands if it is none."""
    if values.get(name) is None:
        raise ValueError(f"{where} lacks {name}: it is not a MiniCPM-o 4.5 checkpoint's")
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {name} is {value!r}, where a positive whole number is expected")
    return value


def number(values: Mapping[str, Any], name: str, where: str, usual: float) -> float:
    """Setting `name`, a positive number; `usual` where it is not given."""
    value = usual if values.get(name) is None else values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{where}: {name} is {value!r}, where a positive number is expected")
    return value


def device_of(name: str, device: Place | Mapping[str, str | int]) -> Place:
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        if _starts_like_a_pointer(path):
            raise ValueError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull` in its folder") from error
        raise ValueError(f"{path} cannot be read as safetensors ({error}): truncated? download it again") from error


def _starts_like_a_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(24) == b"version https://git-lfs."
