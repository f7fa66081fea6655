"""Generators of feeds, run together: one forward of the language model serves everybody's next feed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from a2t.duplex.conversation import Conversation
from a2t.duplex.protocol import AUDIO_ID
from a2t.duplex.unit_loop import Feed, Reply
from a2t.kv.cache import KVArena
from a2t.kv.ledger import Ledger
from a2t.models.base import DuplexModel

Observer = Callable[[Conversation, Feed, Sequence[int], Tensor], None]


@dataclass
class Task:
    """A generator of feeds that owns a row while it runs; `done(value, task)` gets what it returns."""

    row: int
    ledger: Ledger
    steps: Generator[Feed, Reply, Any]
    done: Callable[[Any, Task], None]
    conversation: Conversation | None  # None on a scratch row
    started: float
    wait_s: float = 0.0
    forwards: int = 0
    feed: Feed | None = None  # what it wants fed next


class Batcher:
    """Runs tasks over one arena. `hurry_after_s`: time after which a task's replies say `hurry`."""

    def __init__(
        self,
        model: DuplexModel,
        arena: KVArena,
        clock: Callable[[], float],
        hurry_after_s: float | None,
        observer: Observer | None,
    ):
        self.model, self.arena, self.clock = model, arena, clock
        self.hurry_after_s, self.observer = hurry_after_s, observer
        self.tasks: list[Task] = []

    def start(self, task: Task) -> None:
        """Runs a task up to its first feed."""
        self.tasks.append(task)
        self._advance(task, None)

    def step(self) -> None:
        """One forward over the feeds of all tasks."""
        if self.tasks:
            tasks = list(self.tasks)
            for task, reply in zip(tasks, self._forward(tasks), strict=True):
                self._advance(task, reply)

    def _advance(self, task: Task, reply: Reply | None) -> None:
        try:
            task.feed = next(task.steps) if reply is None else task.steps.send(reply)
        except StopIteration as end:
            self.tasks.remove(task)
            task.done(end.value, task)

    def _forward(self, tasks: list[Task]) -> list[Reply]:
        feeds = [task.feed for task in tasks if task.feed is not None]
        assert len(feeds) == len(tasks)
        device = self.model.shape.device
        batch = self.arena.pack([task.row for task in tasks], [len(feed.ids) for feed in feeds])
        ids_T = torch.tensor([i for feed in feeds for i in feed.ids], device=device)
        e_TD = self.model.embed(ids_T.clamp(min=0))
        audio = [feed.audio_AD for feed in feeds if feed.audio_AD is not None]
        if audio:
            e_TD[ids_T == AUDIO_ID] = torch.cat(audio).to(e_TD)
        positions = [book(task.ledger, feed) for task, feed in zip(tasks, feeds, strict=True)]
        positions_T = torch.tensor([p for fed in positions for p in fed], device=device)
        h_TD = self.model.forward(e_TD, positions_T, batch)
        ends = [offset + count for offset, count in zip(batch.offsets, batch.counts, strict=True)]
        wanted = [n for n, feed in enumerate(feeds) if feed.want]
        replies = [Reply() for _ in tasks]
        if wanted:
            h_ND = h_TD[[ends[n] - 1 for n in wanted]]
            logits_NV = self.model.logits(h_ND).cpu()  # once for all: choosing tokens reads numbers one by one
            for n, h_D, logits_V in zip(wanted, h_ND, logits_NV, strict=True):
                replies[n] = Reply(logits_V, h_D)
        now = self.clock()
        for task, feed, fed, end, reply in zip(tasks, feeds, positions, ends, replies, strict=True):
            task.forwards += 1
            reply.hurry = self.hurry_after_s is not None and now - task.started > self.hurry_after_s
            if self.observer is not None and task.conversation is not None:
                self.observer(task.conversation, feed, fed, h_TD[end - len(fed) : end])
        return replies


def book(ledger: Ledger, feed: Feed) -> Sequence[int]:
    """Enters a feed in the ledger; its positions."""
    if feed.positions is None and feed.units is None:
        return ledger.append(feed.kinds, feed.unit)
    fed: list[int] = []
    units = feed.units or [feed.unit] * len(feed.ids)
    for n, (kind, unit) in enumerate(zip(feed.kinds, units, strict=True)):
        if feed.positions is not None:
            assert feed.positions[n] >= ledger.next_position, "positions only grow"
            ledger.next_position = feed.positions[n]
        fed += ledger.append([kind], unit)
    return fed
