"""Drives many conversations, one batched language-model forward a step. Knows no sockets.

A step takes the audio of every conversation that has a whole unit waiting (encoded in one batch), collects what each
unit loop wants to feed next (prefill and decode rows mixed), runs one forward over all of it, and sends each loop its
logits.  One conversation is the case N = 1.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.protocol import AUDIO_ID, SpecialTokens
from a2t.duplex.unit_loop import Feed, Reply, UnitLoop, UnitResult
from a2t.kv.kinds import Kind
from a2t.models.base import DuplexModel, EncoderState


@dataclass(frozen=True)
class EngineConfig:
    unit_seconds: float = 1.0
    """The deadline of a unit's processing: a unit that takes longer counts as missed."""
    side_channel_budget_s: float | None = 0.8
    """Processing time after which the side channel is told to hurry. None: never, so that decoding does not depend on
    the speed of the machine (evaluation)."""
    scratch_rows: int = 1
    """Rows of the arena kept free of conversations, for text questions."""


@dataclass(frozen=True)
class ConversationConfig:
    budget: int | None = 4000
    """B, everything resident counted. None: no budget."""
    policy: str = "a2t"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    duplex: DuplexConfig = DuplexConfig()
    system_prompt: str | None = None
    """None: the model's own default."""
    audio_units_kept: int = 8
    """Seconds of audio that the journal keeps to rebuild the cache."""


@dataclass(frozen=True)
class UnitStats:
    unit: int
    residents: dict[Kind, int]  # after eviction
    peak: int  # most residents ever
    evicted: int  # positions dropped after this unit
    unit_ms: float  # from taking the unit's audio to its result, eviction included
    wait_ms: float  # the audio's wait for the engine, before that
    forwards: int
    encoder_bytes: int
    kv_bytes: int
    deadline_missed: bool

    @property
    def total_residents(self) -> int:
        return sum(self.residents.values())


class Conversation:
    """One conversation: its row of the arena, ledger, policy, unit loop, encoder state and journal.

    Public attributes: id, config, row, ledger, policy, budget, loop, encoder_state, journal, stats (of the last unit),
    units (finished), deadline_misses, error (what ended it, if anything).
    """


Finished = tuple[Conversation, UnitResult, UnitStats]


class Engine:
    """Owns the KV arena of one model and runs all its conversations in one batch.

    `observer(conversation, feed, positions, h_TD)` is called after each forward with every conversation's feed and its
    final hidden states [T, D]: recording what the model said without a second forward.
    """

    def __init__(
        self,
        model: DuplexModel,
        rows: int = 1,
        capacity: int = 16384,
        clock: Callable[[], float] = time.perf_counter,
        config: EngineConfig = EngineConfig(),
        observer: Callable[[Conversation, Feed, range, Tensor], None] | None = None,
    ): ...

    def open(self, config: ConversationConfig = ConversationConfig(), id: str | None = None) -> Conversation:
        """Admits a conversation. ArenaFull if all rows are taken."""

    def push(self, conversation: Conversation, pcm_S: np.ndarray, force_listen: bool = False) -> None:
        """Appends 16 kHz mono float32 samples, any number. `force_listen` holds for the units that this push completes."""

    def step(self) -> list[Finished]:
        """One batched forward over all conversations that have work; the units that it finished."""

    def run(self) -> list[Finished]:
        """Steps until nothing is ready."""

    def ask(self, conversation: Conversation, question: str, max_tokens: int = 64) -> str:
        """Answers a typed question from the re-encoded transcript on a scratch row; the live cache stays untouched."""

    def close(self, conversation: Conversation) -> None: ...

    def save(self, conversation: Conversation, folder: Any) -> None: ...

    def restore(self, folder: Any, id: str | None = None) -> Conversation: ...
