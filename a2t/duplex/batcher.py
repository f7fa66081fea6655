"""Generators of feeds, run together: one forward of the language model serves everybody's next feed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from a2t.duplex.conversation import Conversation
from a2t.duplex.feeds import Feed, Reply
from a2t.duplex.protocol import AUDIO_ID
from a2t.kv.cache import KVArena, Leaving
from a2t.kv.ledger import Ledger
from a2t.models.base import DuplexModel

Observer = Callable[[Conversation, Feed, Sequence[int], Tensor], None]


@dataclass
class Task:
    """A generator of feeds that owns a row while it runs; `done(value, task)` gets what it returns.

    `deadline`: when it should be done; the earliest is served first.  `hurry_at`: when its side channel must close,
    were there no forwards to follow.
    """

    row: int
    ledger: Ledger
    steps: Generator[Feed, Reply, Any]
    done: Callable[[Any, Task], None]
    conversation: Conversation | None  # None on a scratch row
    started: float
    deadline: float
    hurry_at: float = float("inf")
    wait_s: float = 0.0
    forwards: int = 0
    feed: Feed | None = None  # what it wants fed next


@dataclass
class Fed:
    """What one task has got out of a forward."""

    task: Task
    feed: Feed  # what was held over before it included
    positions: Sequence[int]
    h_TD: Tensor  # [positions, D]
    reply: Reply


class Batcher:
    """Runs tasks over one arena, at most `step_tokens` new tokens a forward (a single feed may have more)."""

    def __init__(
        self,
        model: DuplexModel,
        arena: KVArena,
        clock: Callable[[], float],
        step_tokens: int,
        observer: Observer | None,
    ):
        self.model, self.arena, self.clock = model, arena, clock
        self.step_tokens, self.observer = step_tokens, observer
        self.tasks: list[Task] = []
        self.step_s = 0.0  # a forward's time, averaged over the last ten or so

    def start(self, task: Task) -> None:
        """Runs a task up to its first feed."""
        self.tasks.append(task)
        self._advance(task, None)

    def step(self) -> None:
        """One forward over the feeds of the tasks whose deadlines are nearest."""
        if self.tasks:
            begun = self.clock()
            fed = self._forward(self._next())
            took = self.clock() - begun
            self.step_s += (took - self.step_s) / (10 if self.step_s else 1)
            for one in fed:
                one.reply.hurry = begun + took + one.feed.forwards_left * self.step_s > one.task.hurry_at
                self._advance(one.task, one)

    def settle(self, conversation: Conversation) -> None:
        """Feeds what is held over from its last unit alone; otherwise the next feed begins with it."""
        c, now = conversation, self.clock()
        if c.held is not None:
            alone = Task(c.row, c.ledger, _nothing(), lambda _value, _task: None, c, now, now)
            alone.feed = Feed([], [], c.held.unit)
            for fed in self._forward([alone]):
                self._observe(fed)

    def _next(self) -> list[Task]:
        """Earliest deadline first, until the step is full."""
        chosen: list[Task] = []
        tokens = 0
        for task in sorted(self.tasks, key=lambda task: task.deadline):
            assert task.feed is not None
            tokens += len(task.feed.ids)
            if chosen and tokens > self.step_tokens:
                break
            chosen.append(task)
        return chosen

    def _advance(self, task: Task, fed: Fed | None) -> None:
        ended = False
        value: Any = None
        try:
            task.feed = next(task.steps) if fed is None else task.steps.send(fed.reply)
        except StopIteration as end:
            ended, value = True, end.value
        if fed is not None:
            if fed.reply.rejected:
                task.ledger.take_back(fed.reply.rejected)
                self.arena.take_back(task.row, fed.reply.rejected)
            self._observe(fed)
        if ended:
            self.tasks.remove(task)
            task.done(value, task)

    def _observe(self, fed: Fed) -> None:
        """Tells the observer of what was fed and stays."""
        if self.observer is not None and fed.task.conversation is not None:
            n = len(fed.feed.ids) - fed.reply.rejected
            feed = fed.feed.first(n) if fed.reply.rejected else fed.feed
            self.observer(fed.task.conversation, feed, fed.positions[:n], fed.h_TD[:n])

    def _forward(self, tasks: list[Task]) -> list[Fed]:
        feeds: list[Feed] = []
        positions: list[Sequence[int]] = []
        leaving: list[Leaving | None] = []
        for task in tasks:
            feed, at, leaves = self._booked(task)
            feeds.append(feed)
            positions.append(at)
            leaving.append(leaves)
        device = self.model.shape.device
        batch = self.arena.pack([task.row for task in tasks], [len(feed.ids) for feed in feeds], leaving)
        batch.feeds = feeds
        ids_T = torch.tensor([i for feed in feeds for i in feed.ids], device=device)
        e_TD = self.model.embed(ids_T.clamp(min=0))
        audio = [feed.audio_AD for feed in feeds if feed.audio_AD is not None]
        if audio:
            e_TD[ids_T == AUDIO_ID] = torch.cat(audio).to(e_TD)
        positions_T = torch.tensor([p for fed in positions for p in fed], device=device)
        h_TD = self.model.forward(e_TD, positions_T, batch)
        ends = [offset + count for offset, count in zip(batch.offsets, batch.counts, strict=True)]
        wanted = [n for end, feed in zip(ends, feeds, strict=True) for n in range(end - feed.want, end)]
        replies = [Reply() for _ in tasks]
        if wanted:
            wants = [feed.want for feed in feeds]
            h_ND = h_TD[wanted]
            logits_NV = self.model.logits(h_ND).cpu()  # once for all: choosing tokens reads numbers one by one
            for reply, hidden, logits in zip(replies, h_ND.split(wants), logits_NV.split(wants), strict=True):
                if len(logits):
                    reply.logits, reply.hidden = logits, hidden
        for task in tasks:
            task.forwards += 1
        parts = h_TD.split(batch.counts)
        return [Fed(*one) for one in zip(tasks, feeds, positions, parts, replies, strict=True)]

    def _booked(self, task: Task) -> tuple[Feed, Sequence[int], Leaving | None]:
        """A task's feed with what its conversation's last unit held over in front, and all their positions."""
        feed, c = task.feed, task.conversation
        assert feed is not None
        positions = book(task.ledger, feed)
        held = None if c is None else c.held
        if c is None or held is None:
            return feed, positions, None
        c.held = None
        leaving = Leaving(len(held.ids), held.leaving) if held.leaving else None
        return held.before(feed), [*held.positions, *positions], leaving


def _nothing() -> Generator[Feed, Reply, None]:
    yield from ()


def book(ledger: Ledger, feed: Feed) -> Sequence[int]:
    """Enters a feed in the ledger; its positions."""
    if feed.positions is None and feed.units is None:
        return ledger.append(feed.kinds, feed.unit) if feed.ids else []
    fed: list[int] = []
    units = feed.units or [feed.unit] * len(feed.ids)
    for n, (kind, unit) in enumerate(zip(feed.kinds, units, strict=True)):
        if feed.positions is not None:
            assert feed.positions[n] >= ledger.next_position, "positions only grow"
            ledger.next_position = feed.positions[n]
        fed += ledger.append([kind], unit)
    return fed
