"""What a training run leaves behind, in a folder or under a URI.

    checkpoints/step-000123/   a PEFT adapter and everything a resumed run needs; the newest stay
    adapter/                   the last adapter       best/   the one that validated best
    log.jsonl                  a line a step          validation.jsonl   a line an epoch

Only the first worker writes.  Logs are appended here on this machine and, where the folder is remote, put there with
each checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from a2t.distill.place import Place

LOGS = ("log.jsonl", "validation.jsonl")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "scope.json")
LAST = "training.json"
"""The file that marks a checkpoint as whole."""


class RunFolder:
    def __init__(self, where: str | Path | Place):
        self.place = Place(where)
        self.checkpoints = self.place / "checkpoints"
        self._scratch = None if self.place.is_local else tempfile.TemporaryDirectory()
        self.local = Path(self.place.path if self._scratch is None else self._scratch.name)
        """Where logs are written; `publish` puts them where they belong."""

    def newest(self) -> Place | None:
        """The newest whole checkpoint."""
        whole = (self.checkpoints / n for n in reversed(self._steps()))
        return next((p for p in whole if (p / LAST).is_file()), None)

    def checkpoint(self, step: int) -> Place:
        return self.checkpoints / f"step-{step:06d}"

    def prune(self, keep: int) -> None:
        for name in self._steps()[:-keep]:
            (self.checkpoints / name).remove()

    def _steps(self) -> list[str]:
        return [n for n in self.checkpoints.names() if re.fullmatch(r"step-\d+", n)]

    def begin(self, done: int) -> None:
        """Steps after the checkpoint are taken again: their lines go."""
        self.local.mkdir(parents=True, exist_ok=True)
        for name in LOGS:
            kept = [line for line in self.lines(name) if line["step"] <= done]
            (self.local / name).write_text("".join(json.dumps(line) + "\n" for line in kept))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What a log holds where the run lies; a line that was being written when a worker died is left out."""
        log = self.place / name
        found = []
        for line in log.text().splitlines() if log.is_file() else ():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return found

    def append(self, name: str, line: dict[str, Any]) -> None:
        with (self.local / name).open("a") as out:
            out.write(json.dumps(line) + "\n")

    def publish(self) -> None:
        if self._scratch is None:
            return
        for path in (p for p in self.local.rglob("*") if p.is_file()):
            (self.place / str(path.relative_to(self.local))).put(path)

    def keep_adapter(self, checkpoint: Place, name: str, **about: Any) -> None:
        """Copies a checkpoint's adapter to `name`; `about` goes into a file beside it."""
        with local_adapter(checkpoint) as adapter, (self.place / name).writing(last=ADAPTER_FILES[1]) as folder:
            folder.mkdir()
            for file in adapter.iterdir():
                if file.name in (*ADAPTER_FILES, "README.md"):
                    shutil.copyfile(file, folder / file.name)
            if about:
                (folder / "validation.json").write_text(json.dumps(about, indent=1) + "\n")


@contextmanager
def local_adapter(place: Place) -> Iterator[Path]:
    """An adapter's folder on this machine."""
    if place.is_local:
        yield Path(place.path)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in set(place.names()) & set(ADAPTER_FILES):
            shutil.copyfile((place / name).local(), Path(folder) / name)
        yield Path(folder)


def best_of(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The validation that did best: the lowest score, the earliest of equals."""
    return min(lines, key=lambda line: (line["score"], line["step"]), default=None)
