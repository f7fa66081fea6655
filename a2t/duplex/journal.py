"""What must outlive the cache: prompt, text and the last units of audio. The cache can be rebuilt from it elsewhere.

A rebuilt cache holds what an evicted one holds: the prefix, the retained text at its old positions, and the last units
whole, their audio encoded anew.  Text keys and values are then those of text read without its audio, so the rebuilt
conversation goes on sensibly, not bit for bit; `Engine.save` is the exact way.
"""

from __future__ import annotations

import base64
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from a2t.duplex.feeds import PREFILL, Feed, Reply, UnitResult
from a2t.duplex.protocol import Layout, SpecialTokens, UnitTokens, after_audio, text_question_layout
from a2t.duplex.unit_loop import UnitLoop
from a2t.kv.kinds import TEXT, Kind
from a2t.models.base import TextTokenizer

if TYPE_CHECKING:
    from a2t.duplex.engine import Conversation, Engine


@dataclass(frozen=True)
class UnitRecord:
    position: int  # of its <unit>
    native_ids: tuple[int, ...]
    transcript_ids: tuple[int, ...] | None  # None: the side channel stayed shut
    response_ids: tuple[int, ...]

    @property
    def tokens(self) -> UnitTokens:
        return UnitTokens(self.native_ids, self.transcript_ids)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> UnitRecord:
        transcript = saved["transcript_ids"]
        return cls(
            saved["position"],
            tuple(saved["native_ids"]),
            None if transcript is None else tuple(transcript),
            tuple(saved["response_ids"]),
        )


@dataclass
class Question:
    """A typed question under way. `answer` and `ids` are set when `done` is."""

    text: str
    done: bool = False
    answer: str = ""
    ids: list[int] = field(default_factory=list)


class Journal:
    """One conversation's journal; the engine writes it unit by unit. `config` and `loop_state` are JSON values of the
    conversation's settings and of its loop after the last finished unit."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.prefix_ids: list[int] = []
        self.samples_per_unit = 16000
        self.units: list[UnitRecord] = []
        self.loop_state: dict[str, Any] | None = None
        self.next_position = 0  # of the unit to come
        self._audio: list[np.ndarray] = []
        self._audio_start = 0  # sample index of the first kept sample
        self._samples = 0  # heard in all

    # writing

    def start(self, config: Mapping[str, Any], prefix_ids: Sequence[int], samples_per_unit: int) -> None:
        self.config, self.prefix_ids, self.samples_per_unit = dict(config), list(prefix_ids), samples_per_unit
        self.next_position = len(prefix_ids)

    def hear(self, pcm_S: np.ndarray) -> None:
        self._audio.append(pcm_S.copy())
        self._samples += len(pcm_S)

    def note(self, result: UnitResult, loop_state: dict[str, Any], next_position: int) -> None:
        """A finished unit; `next_position` is the ledger's after it. Audio older than the kept units is forgotten."""
        transcript = tuple(result.transcript_ids) if result.segment_opened else None
        self.units.append(
            UnitRecord(self.next_position, tuple(result.native_ids), transcript, tuple(result.response_ids))
        )
        self.loop_state, self.next_position = loop_state, next_position
        start = (len(self.units) - self.config["audio_units_kept"]) * self.samples_per_unit
        while self._audio and self._audio_start + len(self._audio[0]) <= start:
            self._audio_start += len(self._audio.pop(0))
        if self._audio and self._audio_start < start:
            self._audio[0] = self._audio[0][start - self._audio_start :].copy()
            self._audio_start = start

    # reading

    @property
    def transcript_ids(self) -> list[int]:
        return [i for unit in self.units for i in unit.transcript_ids or ()]

    @property
    def audio_S(self) -> np.ndarray:
        """The kept samples, 16 kHz mono float32; they begin at the start of a unit."""
        return np.concatenate(self._audio) if self._audio else np.zeros(0, np.float32)

    def transcript(self, tokenizer: TextTokenizer) -> str:
        """Everything written so far, evicted or not."""
        return tokenizer.decode(self.transcript_ids)

    # asking

    def question_layout(self, tokens: SpecialTokens, tokenizer: TextTokenizer, question: str) -> Layout:
        if not question.strip():
            raise ValueError("the question is empty; type one")
        return text_question_layout(tokens, self.prefix_ids, self.transcript_ids, tokenizer.encode(question))

    def answer(self, tokens: SpecialTokens, layout: Layout, max_tokens: int) -> Generator[Feed, Reply, list[int]]:
        """Feeds the question and decodes greedily until `<|turn_eos|>`, a terminator or `max_tokens`; returns the text
        tokens. The side channel's tokens are forbidden."""
        forbidden = [i for i in (tokens.asr_start, tokens.asr_end, tokens.tts_pad) if i is not None]
        split = layout.units.count(-1)
        cuts = [*range(0, split, PREFILL), *range(split, len(layout), PREFILL), len(layout)]
        for start, stop in pairwise(cuts[:-1]):
            yield Feed(layout.ids[start:stop], layout.kinds[start:stop], layout.units[start])
        reply = yield Feed(layout.ids[cuts[-2] :], layout.kinds[cuts[-2] :], unit=0, want=1)
        ids: list[int] = []
        for _ in range(max_tokens):
            assert reply.logits is not None
            logits_V = reply.logits[-1].clone()
            logits_V[forbidden] = -torch.inf
            token = int(logits_V.argmax())
            if token == tokens.turn_eos or token in tokens.terminators:
                break
            if token not in tokens.control:
                ids.append(token)
            reply = yield Feed([token], [tokens.native_kind(token)], unit=0, want=1)
        return ids

    def ask(self, engine: Engine, question: str, max_tokens: int = 64) -> str:
        return engine.ask(self, question, max_tokens)

    # rebuilding

    def rebuild(self, engine: Engine, id: str | None = None) -> Conversation:
        """The conversation again, on an engine that never saw it: positions, turn, random state and settings as they
        were. Audio that was heard and not yet processed is processed next. Feeds begin with the engine's next step.

        ArenaFull if every row is taken, ValueError if the text does not fit the engine's capacity.
        """
        from a2t.duplex.conversation import ConversationConfig

        conversation = engine.admit(ConversationConfig.from_json(self.config), id)
        copy = conversation.journal = Journal.from_json(self.to_json())
        conversation.units = len(copy.units)
        # Finished units whose audio is kept; what follows them was heard and not processed.
        kept = len(copy.units) - copy._audio_start // copy.samples_per_unit
        whole = min(kept, len(copy.audio_S) // copy.samples_per_unit)
        pieces = np.split(copy.audio_S, [n * copy.samples_per_unit for n in range(1, whole + 1)])
        for piece in pieces:  # a unit at a time, as a live stream comes
            if len(piece):
                conversation.encoder_state.push(piece)
        audio: dict[int, Tensor] = {}
        with torch.no_grad():
            # All is pushed before: an encoder that looks ahead gives the last unit too, and it is not heard twice.
            for unit in range(len(copy.units) - whole, len(copy.units)):
                audio[unit] = engine.model.encoder.encode([conversation.encoder_state])[0]
        conversation.await_units(engine.clock())
        room = engine.arena.capacity - engine.unit_room(conversation)
        feeds = list(copy._feeds(conversation.loop, audio, engine.model.encoder.embeddings_per_unit, room))
        needed = sum(len(feed.ids) for feed in feeds) + engine.unit_room(conversation)
        if needed > engine.arena.capacity:
            engine.close(conversation)
            raise ValueError(
                f"rebuilding takes {needed} positions and the engine's capacity is {engine.arena.capacity}; "
                "make the engine with a larger capacity"
            )

        def rebuilt() -> None:
            if copy.loop_state is not None:
                conversation.loop.load_state_dict(copy.loop_state)
            conversation.ledger.next_position = copy.next_position
            engine.evict(conversation)

        engine.run_alone(conversation, _fed(feeds), rebuilt)
        return conversation

    def _feeds(self, loop: UnitLoop, audio: Mapping[int, Tensor], audio_per_unit: int, room: int) -> Iterator[Feed]:
        """Prefix, text of the older units, the units in `audio` whole, text of later ones. Where the policy folds text,
        the oldest is left out as far as all would exceed `room` positions: it had left the cache already."""
        prefix, heard = list(loop.prefix(self.prefix_ids)), []
        # A window that renumbers positions leaves no old ones to return to.
        keep_positions = all(a.position < b.position for a, b in pairwise(self.units))
        text = self._text(loop.tokens, audio_per_unit)
        first, last = (min(audio), max(audio)) if audio else (len(self.units), len(self.units))
        older = [t for t in text if t.unit < first]
        later = [t for t in text if t.unit > last]
        for unit, audio_AD in audio.items():
            loop.next_unit = unit
            feed = next(loop.replay(audio_AD, self.units[unit].tokens))
            if keep_positions:
                start = self.units[unit].position
                feed.positions = list(range(start, start + len(feed.ids)))
            heard.append(feed)
        if self.config["policy_options"].get("text_tier") == "fold":
            spare = room - sum(len(feed.ids) for feed in [*prefix, *heard]) - len(later)
            older = older[max(0, len(older) - max(0, spare)) :]
        yield from [*prefix, *_joined(older, keep_positions), *heard, *_joined(later, keep_positions)]

    def _text(self, tokens: SpecialTokens, audio_per_unit: int) -> list[_Text]:
        """All text that the cache retains, in order."""
        return [
            _Text(token, kind, n, unit.position + 1 + audio_per_unit + offset)
            for n, unit in enumerate(self.units)
            for offset, (token, kind) in enumerate(zip(*after_audio(tokens, unit.tokens), strict=True))
            if kind in TEXT
        ]

    # saving

    def to_json(self) -> dict[str, Any]:
        """JSON values that `from_json` restores exactly; the audio in base64."""
        return {
            "config": self.config,
            "prefix_ids": self.prefix_ids,
            "samples_per_unit": self.samples_per_unit,
            "units": [asdict(unit) for unit in self.units],
            "loop_state": self.loop_state,
            "next_position": self.next_position,
            "samples": self._samples,
            "audio_start": self._audio_start,
            "audio": base64.b64encode(self.audio_S.astype("<f4").tobytes()).decode(),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Journal:
        journal = cls()
        journal.start(saved["config"], saved["prefix_ids"], saved["samples_per_unit"])
        journal.units = [UnitRecord.from_json(unit) for unit in saved["units"]]
        journal.loop_state, journal.next_position = saved["loop_state"], saved["next_position"]
        audio_S = np.frombuffer(base64.b64decode(saved["audio"]), "<f4").astype(np.float32)
        journal._audio = [audio_S] if len(audio_S) else []
        journal._audio_start, journal._samples = saved["audio_start"], saved["samples"]
        return journal


@dataclass(frozen=True)
class _Text:
    token: int
    kind: Kind
    unit: int
    position: int


def _joined(text: Sequence[_Text], keep_positions: bool) -> Iterator[Feed]:
    for start in range(0, len(text), PREFILL):
        part = text[start : start + PREFILL]
        feed = Feed([t.token for t in part], [t.kind for t in part], unit=part[-1].unit, units=[t.unit for t in part])
        if keep_positions:
            feed.positions = [t.position for t in part]
        yield feed


def _fed(feeds: Sequence[Feed]) -> Generator[Feed, Reply, None]:
    for feed in feeds:  # noqa: UP028 -- a list takes no replies
        yield feed
