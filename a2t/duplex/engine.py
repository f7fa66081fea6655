"""Drives many conversations, one batched language-model forward a step. Knows no sockets.

A step takes the audio of every conversation that has a whole unit waiting (encoded in one batch), collects what the
unit loops want to feed next (prefill and decode rows mixed, the nearest deadline first), runs one forward over it, and
sends each loop its logits.  One conversation is the case N = 1.  An engine belongs to one thread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from a2t.duplex import snapshot
from a2t.duplex.batcher import Batcher, Observer, Task
from a2t.duplex.conversation import CacheFull, Conversation, ConversationConfig, UnitStats
from a2t.duplex.eviction import carry_out, plan
from a2t.duplex.feeds import Held
from a2t.duplex.journal import Journal, Question
from a2t.duplex.pace import EngineConfig, Overloaded, Pace
from a2t.duplex.protocol import SpecialTokens
from a2t.duplex.unit_loop import Feed, Reply, UnitLoop, UnitResult
from a2t.kv.cache import ArenaFull, rows_in
from a2t.kv.eviction import Eviction
from a2t.kv.ledger import Ledger
from a2t.kv.split import make_arena
from a2t.models.base import DuplexModel

__all__ = [
    "CacheFull",
    "Conversation",
    "ConversationConfig",
    "Engine",
    "EngineConfig",
    "Finished",
    "Observer",
    "Overloaded",
    "UnitStats",
]

Finished = tuple[Conversation, UnitResult, UnitStats]


QUESTION_S = 5.0
"""When a text question should be answered; units come first."""


class Engine:
    """Owns the KV arena of one model and runs all its conversations in one batch.

    The arena is made once, of `rows` conversations of `capacity` positions, or of as many as fit `memory` bytes with
    the scratch rows, and stays at its address.

    `observer(conversation, feed, positions, h_TD)` is called after each forward with every conversation's feed, the
    positions that it got and its final hidden states [T, D]: what the model said can be recorded without a second
    forward.
    """

    def __init__(
        self,
        model: DuplexModel,
        rows: int = 1,
        capacity: int = 16384,
        *,
        memory: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        config: EngineConfig | None = None,
        observer: Observer | None = None,
    ):
        self.model, self.clock = model, clock
        self.config = config or EngineConfig()
        if memory is not None:
            rows = rows_in(memory, model.shape, capacity) - self.config.scratch_rows
        self.rows = rows
        self.arena = make_arena(model.shape, rows + self.config.scratch_rows, capacity)
        self._batcher = Batcher(model, self.arena, clock, self.config.step_tokens, observer)
        self.pace = Pace(self.config)
        self.tokens = SpecialTokens.from_lookup(model.tokenizer.token_id)
        self.conversations: dict[str, Conversation] = {}
        self._finished: list[Finished] = []
        self._errors: list[CacheFull] = []

    # conversations

    def open(self, config: ConversationConfig | None = None, id: str | None = None) -> Conversation:
        """Admits a conversation; its system prompt is fed with the next step. ArenaFull if every row is taken,
        Overloaded if there is no time for another."""
        config = config or ConversationConfig()
        prompt = self.model.default_prompt if config.system_prompt is None else config.system_prompt
        ids = self.model.tokenizer.encode(prompt) if prompt else []  # may refuse the prompt: before a row is taken
        conversation = self.admit(config, id)
        room = self.arena.capacity - self.unit_room(conversation)
        if len(ids) > room:
            self.close(conversation)
            raise ValueError(
                f"the system prompt has {len(ids)} tokens and this engine's capacity leaves {room}; shorten it"
            )
        conversation.journal.start(conversation.config.to_json(), ids, self.model.encoder.samples_per_unit)
        self.run_alone(conversation, conversation.loop.prefix(ids))
        return conversation

    def admit(self, config: ConversationConfig, id: str | None) -> Conversation:
        """A conversation with an empty row and nothing fed. ArenaFull if every row is taken, Overloaded if there is no
        time for another, ValueError if `id` is taken."""
        id = id or uuid.uuid4().hex
        if id in self.conversations:
            raise ValueError(f"conversation {id} is already open; close it first or choose another id")
        if len(self.conversations) >= self.rows:
            raise ArenaFull(f"all {self.rows} rows are taken; close a conversation or make an engine with more rows")
        if not self.room:
            raise Overloaded(
                f"{len(self.conversations)} conversations at {1000 * self.pace.unit_cost_s:.0f} ms a unit leave no "
                f"time for another within {self.config.admit_load:.0%} of each second; close one or use another engine"
            )
        loop = UnitLoop(self.tokens, self.model.tokenizer.decode, config.duplex)
        state = self.model.encoder.new_state()
        # bad settings raise before a row is taken
        conversation = Conversation(id, config, loop, state, self.config.unit_seconds)
        conversation.row = self.arena.allocate()
        self.conversations[id] = conversation
        return conversation

    def run_alone(
        self, conversation: Conversation, steps: Generator[Feed, Reply, Any], done: Callable[[], None] = lambda: None
    ) -> None:
        """Queues `steps` for a conversation's row; its units wait until they are through."""
        c = conversation
        now = self.clock()
        due = now + self.config.unit_seconds
        self._batcher.start(Task(c.row, c.ledger, steps, lambda _result, _task: done(), c, now, due))

    def push(self, conversation: Conversation, pcm_S: np.ndarray, force_listen: bool = False) -> None:
        """Appends 16 kHz mono float32 samples [S], any number of them.

        `force_listen` holds for the unit that is being filled, and for all that this push completes.
        ValueError for audio that is not such samples; CacheFull if the conversation has ended that way.
        """
        self._check_open(conversation)
        conversation.hear(pcm_S, force_listen, self.clock())

    def close(self, conversation: Conversation) -> None:
        """Ends a conversation, even within a unit, and frees its row."""
        self._check_open(conversation)
        self._batcher.tasks = [task for task in self._batcher.tasks if task.conversation is not conversation]
        self.arena.release(conversation.row)
        del self.conversations[conversation.id]

    @property
    def room(self) -> int:
        """How many more conversations there are rows for, and time by what a unit has cost so far."""
        rows, most = self.rows - len(self.conversations), self.pace.most()
        return rows if most is None else max(0, min(rows, most - len(self.conversations)))

    # work

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._batcher.tasks or self._finished or self._errors or self._ready())

    def step(self) -> list[Finished]:
        """One batched forward over all that have work; returns the units that it finished.

        CacheFull for a conversation whose row has no room for another unit: raised once, after everybody else's work is
        done; units finished in that step come with the next one.
        """
        self._step(self._ready())
        if self._errors:
            raise self._errors.pop(0)
        finished, self._finished = self._finished, []
        return finished

    def run(self) -> list[Finished]:
        """Steps until nothing is ready. CacheFull as in `step`; call again for what was finished."""
        finished: list[Finished] = []
        try:
            while self.busy:
                finished += self.step()
        except CacheFull:
            self._finished = finished + self._finished
            raise
        return finished

    def ask(self, about: Conversation | Journal, question: str, max_tokens: int = 64) -> str:
        """Answers a typed question from the re-encoded transcript on a scratch row; live caches stay untouched.

        Other conversations go on meanwhile; the units that they finish come with the next `step`.
        """
        asked = self.submit(about, question, max_tokens)
        while not asked.done:
            self._step(self._ready())
        return asked.answer

    def submit(self, about: Conversation | Journal, question: str, max_tokens: int = 64) -> Question:
        """The same without waiting: `step` works on it along with everything else until `done` is set.

        ArenaFull if the scratch rows are busy, ValueError if the transcript does not fit the capacity.
        """
        journal = about.journal if isinstance(about, Conversation) else about
        asked = Question(question)
        layout = journal.question_layout(self.tokens, self.model.tokenizer, question)
        if len(layout) + max_tokens > self.arena.capacity:
            raise ValueError(
                f"a transcript of {len(layout)} positions and {max_tokens} of answer do not fit the capacity of "
                f"{self.arena.capacity}; make the engine with a larger capacity"
            )
        if sum(task.conversation is None for task in self._batcher.tasks) >= self.config.scratch_rows:
            raise ArenaFull(
                f"all {self.config.scratch_rows} scratch rows are busy; wait for an answer or configure more"
            )
        row = self.arena.allocate()

        def done(ids: list[int], task: Task) -> None:
            self.arena.release(row)
            asked.ids, asked.answer, asked.done = ids, self.model.tokenizer.decode(ids), True

        steps = journal.answer(self.tokens, layout, max_tokens)
        now = self.clock()
        self._batcher.start(Task(row, Ledger(), steps, done, None, now, now + QUESTION_S))
        return asked

    def save(self, conversation: Conversation, folder: str | Path) -> None:
        """Writes everything of a conversation to `folder`; the restored one continues bit for bit.

        A unit in flight is finished first; its result comes with the next `step`.
        """
        self._check_open(conversation)
        while any(task.conversation is conversation for task in self._batcher.tasks):
            self._step([c for c in self._ready() if c is not conversation])
        snapshot.save(self, conversation, Path(folder))

    def restore(self, folder: str | Path, id: str | None = None) -> Conversation:
        """Admits a saved conversation, under its own id unless another is given.

        ArenaFull if every row is taken; ValueError if the folder is damaged or written by a model of another shape.
        """
        return snapshot.restore(self, Path(folder), id)

    def evict(self, conversation: Conversation) -> Eviction:
        """Applies the conversation's policy; called after each unit."""
        eviction = plan(conversation)
        renumbers = eviction.rotation is not None or eviction.refeed is not None
        if renumbers or (eviction and conversation.held is not None and conversation.held.leaving):
            self.settle(conversation)
        carry_out(self.model, self.arena, conversation, eviction)
        return eviction

    @torch.no_grad()
    def settle(self, conversation: Conversation) -> None:
        """Feeds the tokens that end its last unit now, in a forward of their own, and drops what leaves with them: the
        arena then holds what the ledger says. Otherwise they come with the next unit."""
        self._batcher.settle(conversation)

    def unit_room(self, conversation: Conversation) -> int:
        """Positions that its next unit may take."""
        return conversation.loop.positions_per_unit(self.model.encoder.embeddings_per_unit)

    # inside

    def _check_open(self, conversation: Conversation) -> None:
        if self.conversations.get(conversation.id) is not conversation:
            raise ValueError(f"conversation {conversation.id} is not open in this engine; open or restore it first")

    def _ready(self) -> list[Conversation]:
        """Conversations with a whole unit waiting and nothing in flight."""
        at_work = {task.row for task in self._batcher.tasks}
        return [c for c in self.conversations.values() if c.waiting and c.error is None and c.row not in at_work]

    @torch.no_grad()
    def _step(self, ready: list[Conversation]) -> None:
        begun, finished = self.clock(), len(self._finished)
        self._take_units(ready)
        self._batcher.step()
        self.pace.note(self.clock() - begun, len(self._finished) - finished)

    def _take_units(self, ready: list[Conversation]) -> None:
        for c in ready:
            if self._needs(c) > self.arena.capacity:
                c.error = CacheFull(c, self.arena.capacity)
                self._errors.append(c.error)
        ready = [c for c in ready if c.error is None]
        if not ready:
            return
        now = self.clock()
        audio_NAD = self.model.encoder.encode([c.encoder_state for c in ready])
        for c, audio_AD in zip(ready, audio_NAD, strict=True):
            unit = c.waiting.popleft()
            task = Task(
                c.row,
                c.ledger,
                c.loop.unit(audio_AD, unit.force_listen),
                self._finish_unit,
                c,
                started=now,
                deadline=unit.deadline,
                wait_s=now - unit.arrived,
            )
            if self.config.side_channel_budget_s is not None:
                task.hurry_at = unit.deadline - max(0.0, self.config.unit_seconds - self.config.side_channel_budget_s)
            self._batcher.start(task)

    def _needs(self, c: Conversation) -> int:
        """The most positions that its row will hold during the next unit: what leaves does so after the first feed."""
        after = c.ledger.residents + self.unit_room(c)
        if c.held is None:
            return after
        first = len(c.held.ids) + 1 + self.model.encoder.embeddings_per_unit + c.loop.DRAFTS
        return max(after, self.arena.lengths[c.row] + first)

    def _finish_unit(self, result: UnitResult, task: Task) -> None:
        c = task.conversation
        assert c is not None
        c.units += 1
        ids, kinds = c.loop.take_held()
        c.held = Held(tuple(ids), tuple(kinds), result.unit, c.ledger.append(kinds, result.unit).start)
        eviction = self.evict(c)
        c.journal.note(result, c.loop.state_dict(), c.ledger.next_position)
        if self.model.shape.device.type == "cuda":  # what was queued for this unit counts as its time
            torch.cuda.synchronize(self.model.shape.device)
        now = self.clock()
        missed = now > task.deadline
        c.deadline_misses += missed
        c.stats = UnitStats(
            unit=result.unit,
            residents=c.ledger.counts(),
            peak=c.ledger.peak,
            evicted=len(eviction.drop),
            evicted_units=eviction.units,
            unit_ms=1000 * (now - task.started),
            wait_ms=1000 * task.wait_s,
            forwards=task.forwards,
            encoder_bytes=c.encoder_state.nbytes,
            kv_bytes=c.ledger.residents * self.arena.bytes_per_position,
            deadline_missed=missed,
        )
        self._finished.append((c, result, c.stats))
