"""One session on an engine: its row, its books, its voice, and what is told of each unit. No Ray."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from a2t.duplex.conversation import Conversation, ConversationConfig, UnitStats
from a2t.duplex.engine import Engine, Finished
from a2t.duplex.protocol import TOKEN_TEXT
from a2t.duplex.unit_loop import UnitResult
from a2t.models.base import DuplexModel
from a2t.models.speech import SpeechStream
from serve_apps.book import Book
from serve_apps.messages import Failure, Parcel, SessionEnd, UnitReport

ENGINE_FAILED = Failure("engine_failed", "the engine of this conversation failed; what it heard is in the transcript")
NOT_HERE = Failure("no_row", "no row is kept for this session: promises lapse, and moved conversations are elsewhere")


@dataclass
class Guest:
    """First a promise of a row, then its conversation."""

    promised_until: float
    book: Book | None = None
    conversation: Conversation | None = None
    voice: SpeechStream | None = None
    said_ids: list[int] = field(default_factory=list)  # of the open turn
    said: str = ""
    force_listen: bool = False  # asked for with no audio: holds for the next input
    fetched: int = -1  # the last unit that the session actor has
    end: SessionEnd | None = None
    sealed: Parcel | None = None  # what is left of it here once it is on its way to another engine
    news: asyncio.Event = field(default_factory=asyncio.Event)
    last_poll: float = field(default_factory=time.monotonic)

    @property
    def live(self) -> bool:
        return self.conversation is not None and self.end is None and self.sealed is None

    def abandoned(self, now: float, grace_s: float) -> bool:
        """Whether it was promised a row and never used it, or nobody asks for its results any more."""
        if self.conversation is None:
            return self.book is None and now > self.promised_until
        return now - self.last_poll > grace_s

    def begin(self, engine: Engine, config: ConversationConfig, session: str) -> dict[str, Any]:
        """In the engine's thread, as `leave` is: whoever asked may be gone when it happens. Returns the journal."""
        self.conversation = engine.open(config, id=session)
        return self.conversation.journal.to_json()

    def leave(self, engine: Engine) -> None:
        if self.conversation is not None and self.sealed is None:
            engine.close(self.conversation)


@dataclass
class Finishing:
    """A finished unit on its way from the engine's thread, with what the journal wrote of it."""

    session: str
    result: UnitResult
    stats: UnitStats
    note: dict[str, Any]

    @classmethod
    def of(cls, finished: Finished) -> Finishing:
        """In the engine's thread, before the next step writes on."""
        conversation, result, stats = finished
        journal = conversation.journal
        note = {
            "unit": asdict(journal.units[result.unit]),
            "loop_state": journal.loop_state,
            "next_position": journal.next_position,
        }
        return cls(conversation.id, result, stats, note)


class Reporter:
    """Turns what a model did in a unit into what is told of it, speech included."""

    def __init__(self, model: DuplexModel):
        self._model = model
        self._special = {model.tokenizer.token_id(text): text for text in TOKEN_TEXT.values()}

    def report(self, guest: Guest, unit: Finishing) -> UnitReport:
        result, stats, decode = unit.result, unit.stats, self._model.tokenizer.decode
        guest.said_ids += result.response_ids
        whole = decode(guest.said_ids) if guest.said_ids else ""  # what a token adds may depend on those before it
        response, guest.said = whole.removeprefix(guest.said), whole
        speech_S = None
        if guest.voice is not None and (result.speech_ids or result.end_of_turn):
            speech_S = guest.voice.say(result.speech_ids, result.speech_hidden_ND, response, result.end_of_turn)
        if guest.voice is not None and result.listening and guest.said_ids:
            guest.voice.stop()
        if result.end_of_turn or result.listening:
            guest.said_ids, guest.said = [], ""
        embeddings = self._model.encoder.embeddings_per_unit
        written = len(result.transcript_ids) + 2 if result.segment_opened else 0
        return UnitReport(
            unit=result.unit,
            listening=result.listening,
            end_of_turn=result.end_of_turn,
            decision=self._special.get(result.decision) or decode([result.decision]),
            transcript=result.transcript_text.strip(),
            response=response,
            segment_closed_by=result.segment_closed_by,
            residents={kind.name.lower(): count for kind, count in stats.residents.items()},
            peak=stats.peak,
            evicted=stats.evicted,
            unit_ms=stats.unit_ms,
            missed=stats.deadline_missed,
            forwards=stats.forwards,
            kv_bytes=stats.kv_bytes,
            encoder_bytes=stats.encoder_bytes,
            positions=1 + embeddings + len(result.native_ids) + written + 1,
            input_tokens=embeddings,
            output_tokens=len(result.native_ids) + written,
            speech_S=speech_S,
            note=unit.note,
        )
