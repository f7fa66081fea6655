"""The conversation of the OpenAI realtime dialect as clients see it: its items, and what becomes one. No Ray, no
sockets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from serve_apps.openai_session import Fields

Frame = dict[str, Any]
ITEMS_KEPT = 512


@dataclass
class Said:
    """What the user says. `due`: the unit in which the last of its words may come."""

    id: str
    started_ms: int
    by_voice: bool
    pieces: list[str] = field(default_factory=list)
    due: int | None = None
    prolonged: bool = False
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return " ".join(self.pieces)


@dataclass
class Answer:
    """A response, and its item once the model speaks. `turn`: the model's; None: asked for, nothing said yet."""

    id: str
    item: str
    spoken: bool
    metadata: Fields | None = None
    turn: int | None = None
    text: str = ""
    samples: int = 0
    units: int = 0
    talked_over: bool = False


class Items:
    """The conversation's items as clients address them; the oldest are forgotten."""

    def __init__(self) -> None:
        self._items: dict[str, Frame] = {}
        self._before: dict[str, str | None] = {}
        self._lasted_ms: dict[str, float] = {}
        self.last: str | None = None

    def put(self, item: Frame, lasted_ms: float = 0.0) -> str | None:
        """Adds one, or a newer state of it; returns the id of the item before it."""
        id = item["id"]
        if id not in self._items:
            self._before[id], self.last = self.last, id
        self._items[id], self._lasted_ms[id] = item, lasted_ms
        while len(self._items) > ITEMS_KEPT:
            self.delete(next(iter(self._items)))
        return self._before[id]

    def get(self, id: object) -> Frame | None:
        return self._items.get(id) if isinstance(id, str) else None

    def delete(self, id: object) -> None:
        if isinstance(id, str) and self._items.pop(id, None) is not None:
            del self._lasted_ms[id], self._before[id]
            if self.last == id:
                self.last = next(reversed(self._items), None)

    def truncate(self, id: object, heard_ms: int) -> None:
        """An answer of which only the first `heard_ms` were heard keeps so much of its words."""
        item = self.get(id)
        if item is None or not isinstance(id, str) or self._lasted_ms[id] <= heard_ms:
            return
        share = heard_ms / self._lasted_ms[id]

        def kept(content: Frame) -> Frame:
            words = (content.get("transcript") or "").split(" ")
            return {**content, "transcript": " ".join(words[: round(len(words) * share)])}

        self._items[id] = {**item, "content": [kept(c) for c in item["content"]]}
        self._lasted_ms[id] = heard_ms


def message(id: str, role: str, content: Iterable[Frame], status: str = "completed") -> Frame:
    fields = {"id": id, "object": "realtime.item", "type": "message", "status": status}
    return {**fields, "role": role, "content": list(content)}


def part(answer: Answer, text: str) -> Frame:
    return {"type": "audio", "transcript": text} if answer.spoken else {"type": "text", "text": text}
