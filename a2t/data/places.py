"""Where a corpus lies: a folder, a URI that fsspec knows (s3://, gs://, hf://, ...), or a data set of the hub."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec


@dataclass(frozen=True)
class Place:
    """`given`: as the user named it; `root`: an absolute path or a URI; `config`: of a data set of the hub."""

    given: str
    root: str
    config: str | None = None

    @classmethod
    def of(cls, given: str | Path, config: str | None = None) -> Place:
        """ValueError for what is neither a folder, nor a URI, nor a name of the hub's form."""
        given = str(given)
        if "://" in given:
            return cls(given, given.rstrip("/"), config)
        if Path(given).is_dir():
            return cls(given, str(Path(given).resolve()), config)
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", given) and not Path(given).parent.exists():
            return cls(given, f"hf://datasets/{given}", config)
        raise ValueError(f"{given}: there is no such folder; a URI (s3://...) or a hub name (owner/name) would do too")

    def uri(self, path: str) -> str:
        """A path of this place's file system as others can open it: with the scheme, where there is one."""
        scheme, mark, _ = self.root.partition("://")
        return f"{scheme}://{path.lstrip('/')}" if mark else path

    @cached_property
    def path(self) -> str:
        """The root as its file system names it."""
        return str(fsspec.core.url_to_fs(self.root)[1])


def file_system(place: Place) -> Any:
    return fsspec.core.url_to_fs(place.root)[0]


def files_below(place: Place) -> dict[str, int]:
    """Every file and its size in bytes, in order of their paths; of a hub's data set only those of its `config`."""
    try:
        found = file_system(place).find(place.path, detail=True)
    except FileNotFoundError:
        found = {}
    files = {path: int(about.get("size") or 0) for path, about in sorted(found.items())}
    if place.config is not None:
        files = {path: size for path, size in files.items() if place.config in path[len(place.path) :].split("/")[:-1]}
    if not files:
        below = f" in a folder named {place.config!r}" if place.config else ""
        raise ValueError(f"{place.given} holds no file{below}")
    return files


def write_whole(place: Place, path: str, data: bytes) -> None:
    """The file is there whole or not at all."""
    fs = file_system(place)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    part = f"{path}.{uuid.uuid4().hex}.part"
    fs.pipe_file(part, data)
    fs.mv(part, path)
