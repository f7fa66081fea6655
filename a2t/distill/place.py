"""A folder by path or URI (whatever fsspec opens), in which things are whole or absent.

Local files are used where they are.  Remote ones are read through a copy on this machine, kept under `$A2T_CACHE` (or
the system's temporary folder) for all processes and fetched again when they have changed; what is written is made here
first and then put there, the file that marks it as whole last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


def is_uri(where: str | Path) -> bool:
    return "://" in str(where)


def absolute(where: str | Path) -> str:
    """A path that means the same in another process; a URI as it is."""
    return str(where) if is_uri(where) else str(Path(where).resolve())


class Place:
    """`place / "name"` is a folder or file inside. ValueError for a URI of an unknown kind."""

    def __init__(self, where: str | Path | Place):
        self.uri = str(where).rstrip("/")
        self.fs: Any
        try:
            self.fs, self.path = fsspec.url_to_fs(self.uri)
        except (ImportError, ValueError) as error:  # no such protocol, or its package is not installed
            raise ValueError(f"{self.uri} cannot be opened: {error}") from error
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def __str__(self) -> str:
        return self.uri

    def __fspath__(self) -> str:
        return str(self.local())

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.uri}/{name}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def is_file(self) -> bool:
        return bool(self.fs.isfile(self.path))

    def names(self) -> list[str]:
        """What lies in this folder, sorted; nothing if there is no such folder."""
        self.fs.invalidate_cache()
        if not self.fs.isdir(self.path):
            return []
        return sorted(p.rstrip("/").rpartition("/")[2] for p in self.fs.ls(self.path, detail=False))

    def text(self) -> str:
        return str(self.fs.cat_file(self.path).decode())

    def local(self) -> Path:
        """This file on this machine."""
        if self.is_local:
            return Path(self.path)
        key = hashlib.sha256(f"{self.uri} {self.fs.ukey(self.path)}".encode()).hexdigest()[:32]
        copy = _cache() / f"{key}-{self.name}"
        if not copy.is_file():
            part = copy.with_name(f"{copy.name}.{uuid.uuid4().hex}")
            self.fs.get_file(self.path, str(part))
            part.replace(copy)
        return copy

    @contextlib.contextmanager
    def writing(self, last: str = "") -> Iterator[Path]:
        """A path on this machine for the new file or folder; it takes the place of the old one when the block ends
        without an error. Of a remote folder the file `last` is put last: whoever sees it sees all."""
        with self._scratch() as made:
            yield made
            if self.is_local:
                target = Path(self.path)
                if target.is_dir():
                    shutil.rmtree(target)
                made.replace(target)
            elif made.is_dir():
                files = sorted((p for p in made.rglob("*") if p.is_file()), key=lambda p: p.name == last)
                for p in files:
                    (self / str(p.relative_to(made))).put(p)
            else:
                self.put(made)

    def put(self, file: Path) -> None:
        """Copies a file of this machine here."""
        self.fs.makedirs(self.path.rpartition("/")[0], exist_ok=True)
        self.fs.put_file(str(file), self.path)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        if self.is_local:
            part = Path(self.path).with_name(self.name + ".part")
            part.parent.mkdir(parents=True, exist_ok=True)
            remove(part)
            yield part
        else:
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder) / self.name

    def write_text(self, text: str) -> None:
        with self.writing() as path:
            path.write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """The file or folder goes; nothing happens if there is none."""
        if self.fs.exists(self.path):
            self.fs.rm(self.path, recursive=True)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _cache() -> Path:
    folder = Path(os.environ.get("A2T_CACHE") or Path(tempfile.gettempdir()) / f"a2t-{os.getuid()}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
