"""One conversation as the engine holds it: settings, state, figures. No batch, no forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.feeds import Held
from a2t.duplex.journal import Journal
from a2t.duplex.unit_loop import UnitLoop
from a2t.kv.kinds import Kind
from a2t.kv.ledger import Ledger
from a2t.kv.policies import make_policy
from a2t.models.base import EncoderState


@dataclass(frozen=True)
class ConversationConfig:
    budget: int | None = 4000
    """B, everything resident counted, prefix and text too. None: no limit. 0: everything eligible goes."""
    policy: str = "a2t"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    duplex: DuplexConfig = field(default_factory=DuplexConfig)
    system_prompt: str | None = None
    """None: the model's own default."""
    audio_units_kept: int = 8
    """Units of audio that the journal keeps, to rebuild the cache from."""

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise ValueError(f"budget={self.budget} must be 0 (evict all that may go) or more; None sets no limit")
        if self.audio_units_kept < 0:
            raise ValueError(f"audio_units_kept={self.audio_units_kept} must be 0 (keep no audio) or more")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "policy_options": dict(self.policy_options)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> ConversationConfig:
        return cls(**{**saved, "duplex": DuplexConfig(**saved["duplex"])})


@dataclass(frozen=True)
class UnitStats:
    unit: int
    residents: dict[Kind, int]  # after eviction, every kind named
    peak: int  # most residents ever
    evicted: int  # positions dropped after this unit
    evicted_units: tuple[int, ...]
    unit_ms: float  # from taking the unit's audio to its result, eviction included
    wait_ms: float  # before that: from the arrival of the unit's last sample to its being taken
    forwards: int
    encoder_bytes: int
    kv_bytes: int
    deadline_missed: bool  # finished later than a unit's second after its audio was complete

    @property
    def total_residents(self) -> int:
        return sum(self.residents.values())


@dataclass(frozen=True)
class Waiting:
    """A unit whose audio is complete and not yet taken."""

    arrived: float
    deadline: float
    force_listen: bool


class Conversation:
    """Held and driven by an Engine; read it freely, change it through the engine.

    `row`: of the arena. `units`: how many are finished. `stats`: of the last one. `held`: the end of the last unit, in
    the ledger and not yet fed. `error`: what ended the conversation before its close (its row is full), if anything.
    """

    def __init__(
        self,
        id: str,
        config: ConversationConfig,
        loop: UnitLoop,
        encoder_state: EncoderState,
        unit_seconds: float = 1.0,
    ):
        self.id, self.config, self.row = id, config, -1
        self.loop, self.encoder_state, self.unit_seconds = loop, encoder_state, unit_seconds
        self.ledger = Ledger()
        self.policy = make_policy(config.policy, **config.policy_options)
        self.journal = Journal()
        self.stats: UnitStats | None = None
        self.units = 0
        self.deadline_misses = 0
        self.error: CacheFull | None = None
        self.held: Held | None = None
        self.waiting: deque[Waiting] = deque()
        self.due = 0.0  # deadline of the unit queued last
        self.force_listen_asked = False  # for the unit whose audio is not complete yet

    @property
    def budget(self) -> int | None:
        return self.config.budget

    def hear(self, pcm_S: np.ndarray, force_listen: bool, now: float) -> None:
        check_pcm(pcm_S)
        if self.error is not None:
            raise self.error
        self.journal.hear(pcm_S)
        self.encoder_state.push(pcm_S)
        self.force_listen_asked |= force_listen
        self.await_units(now)

    def await_units(self, now: float) -> None:
        """Queues the units that the encoder has become ready to give."""
        complete = self.encoder_state.units_ready - len(self.waiting)
        for _ in range(complete):
            self.queue(now, self.force_listen_asked)
        if complete:
            self.force_listen_asked = False

    def queue(self, now: float, force_listen: bool) -> None:
        """A unit whose audio is complete now. Its second begins now, or when that of the unit before it ends where that
        one still waits: audio that comes faster than time passes is owed no more than a unit a second."""
        begin = max(now, self.due) if self.waiting else now
        self.due = begin + self.unit_seconds
        self.waiting.append(Waiting(now, self.due, force_listen))


class CacheFull(RuntimeError):
    """A conversation's row has no room for another unit; the other conversations go on."""

    def __init__(self, conversation: Conversation, capacity: int):
        held = conversation.ledger.residents
        super().__init__(
            f"conversation {conversation.id}: {held} positions are resident and another unit may not fit the capacity "
            f"of {capacity}; lower its budget, choose a policy that evicts, or give the engine a larger capacity"
        )
        self.conversation = conversation


def check_pcm(pcm_S: np.ndarray) -> None:
    """ValueError unless `pcm_S` is 16 kHz mono float32 samples [S] as the encoder takes them: finite, not empty."""
    if not isinstance(pcm_S, np.ndarray):
        raise ValueError(f"audio is a {type(pcm_S).__name__}; give a numpy array of float32 samples")
    if pcm_S.dtype != np.float32:
        remedy = "divide by 32768 (samples.astype(numpy.float32) / 32768)"
        if pcm_S.dtype != np.int16:
            remedy = "convert it with .astype(numpy.float32), full scale at 1.0"
        raise ValueError(f"audio is {pcm_S.dtype}, not float32; {remedy}")
    if pcm_S.ndim != 1:
        raise ValueError(f"audio has shape {pcm_S.shape}; give one channel [samples], e.g. the mean over channels")
    if not len(pcm_S):
        raise ValueError("audio is empty; leave the push out where there is nothing to hear")
    peak = float(np.abs(pcm_S).max())
    if not np.isfinite(peak):
        bad = int(np.flatnonzero(~np.isfinite(pcm_S))[0])
        raise ValueError(f"audio sample {bad} is {pcm_S[bad]}; replace NaN and infinite samples (numpy.nan_to_num)")
    if peak > 100:
        raise ValueError(f"audio reaches {peak:.0f} where full scale is 1.0; 16-bit values have to be divided by 32768")
