"""Special tokens and the grammar of a unit. No tensors, no models.

    LISTEN unit:  <unit> a1..aN <|listen|> [<|asr_start|> t.. <|asr_end|>] </unit>
    SPEAK unit:   <unit> a1..aN decision  [<|asr_start|> t.. <|asr_end|>] response.. terminator </unit>

The same functions lay out what the unit loop feeds while decoding and what training learns from, so the two cannot
drift apart.  Source: DESIGN.md section 2; facts on MiniCPM-o's own duplex loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from a2t.kv.kinds import Kind

AUDIO_ID = -1
"""Stands in an id list where an audio embedding is fed."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the protocol's tokens. `asr_start` and `asr_end` are the side channel's; None in a model without one."""

    unit: int
    unit_end: int
    listen: int
    speak: int
    tts_bos: int
    tts_pad: int
    chunk_eos: int
    chunk_tts_eos: int
    turn_eos: int
    asr_start: int | None = None
    asr_end: int | None = None

    @classmethod
    def from_lookup(cls, token_id: Callable[[str], int | None]) -> SpecialTokens:
        """`token_id` maps a token's text to its id, None if the vocabulary lacks it.

        Raises ValueError naming every missing native token; a missing side channel is allowed.
        """
        found = {name: token_id(text) for name, text in TOKEN_TEXT.items()}
        missing = [TOKEN_TEXT[n] for n, i in found.items() if i is None and not n.startswith("asr_")]
        if missing:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}: this is not a duplex checkpoint's tokenizer")
        return cls(**found)  # type: ignore[arg-type]

    @cached_property
    def terminators(self) -> frozenset[int]:
        """Tokens that end a unit's generation."""
        return frozenset({self.listen, self.chunk_eos, self.chunk_tts_eos})

    @cached_property
    def control(self) -> frozenset[int]:
        """Every special token; none of them is text."""
        return frozenset(i for f in fields(self) if (i := getattr(self, f.name)) is not None)

    @property
    def has_side_channel(self) -> bool:
        return self.asr_start is not None and self.asr_end is not None

    def native_kind(self, token: int) -> Kind:
        """Kind of a native (not side-channel) token fed after the audio."""
        if token in (self.listen, self.speak, self.tts_bos):  # <|tts_bos|> stands in for <|listen|> in an open turn
            return Kind.DECISION
        if token in (self.chunk_eos, self.chunk_tts_eos, self.turn_eos, self.unit_end):
            return Kind.TERMINATOR
        return Kind.RESPONSE


TOKEN_TEXT: dict[str, str] = {
    "unit": "<unit>",
    "unit_end": "</unit>",
    "listen": "<|listen|>",
    "speak": "<|speak|>",
    "tts_bos": "<|tts_bos|>",
    "tts_pad": "<|tts_pad|>",
    "chunk_eos": "<|chunk_eos|>",
    "chunk_tts_eos": "<|chunk_tts_eos|>",
    "turn_eos": "<|turn_eos|>",
    "asr_start": "<|asr_start|>",
    "asr_end": "<|asr_end|>",
}


@dataclass(frozen=True)
class UnitTokens:
    """What a unit says: `native` are its native tokens in order (first decision .. terminator, without `</unit>`);
    `segment` the transcript ids without delimiters, None where the side channel stayed shut."""

    native: tuple[int, ...]
    segment: tuple[int, ...] | None = None


@dataclass
class Layout:
    """A conversation flattened to positions. All lists have one entry a position except `events`."""

    ids: list[int] = field(default_factory=list)  # AUDIO_ID at audio positions
    kinds: list[Kind] = field(default_factory=list)
    units: list[int] = field(default_factory=list)  # -1 for the prefix
    audio_index: list[int] = field(default_factory=list)  # running index of the audio embedding, -1 elsewhere
    events: list[Event] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[int], kinds: Sequence[Kind], unit: int) -> None:
        assert len(ids) == len(kinds)
        self.ids += ids
        self.kinds += kinds
        self.units += [unit] * len(ids)
        self.audio_index += [-1] * len(ids)


@dataclass(frozen=True)
class Event:
    """One native prediction: the logits at `position` predict `token`, which is fed later (at `fed_at`)."""

    position: int
    fed_at: int
    token: int
    first: bool  # the first decision of its unit
    unit: int


def after_audio(tokens: SpecialTokens, unit: UnitTokens) -> tuple[list[int], list[Kind]]:
    """Ids and kinds of everything in a unit after its audio, `</unit>` included."""
    assert unit.native, "a unit has at least one native token"
    first, rest = unit.native[0], unit.native[1:]
    ids, kinds = [first], [tokens.native_kind(first)]
    if unit.segment is not None:
        assert tokens.asr_start is not None and tokens.asr_end is not None
        ids += [tokens.asr_start, *unit.segment, tokens.asr_end]
        kinds += [Kind.ASR] + [Kind.TRANSCRIPT] * len(unit.segment) + [Kind.ASR]
    ids += [*rest, tokens.unit_end]
    kinds += [tokens.native_kind(t) for t in rest] + [Kind.TERMINATOR]
    return ids, kinds


def lay_out(
    tokens: SpecialTokens, prefix: Sequence[int], units: Sequence[UnitTokens], audio_per_unit: int = 10
) -> Layout:
    """The whole conversation as positions, with its native prediction events.

    An event's predicting position is the position just before its token, or, for the native token that follows a
    segment, the position of `<|asr_end|>` (DESIGN.md section 5).  `</unit>` is fed, never predicted.
    """
    out = Layout()
    out.add(list(prefix), [Kind.PREFIX] * len(prefix), -1)
    audio = 0
    for u, unit in enumerate(units):
        out.add([tokens.unit] + [AUDIO_ID] * audio_per_unit, [Kind.MARKER] + [Kind.AUDIO] * audio_per_unit, u)
        out.audio_index[-audio_per_unit:] = range(audio, audio + audio_per_unit)
        audio += audio_per_unit
        start = len(out)
        out.add(*after_audio(tokens, unit), u)
        skip = 0 if unit.segment is None else len(unit.segment) + 2
        for n, token in enumerate(unit.native):
            at = start + n + (skip if n else 0)
            out.events.append(Event(position=at - 1, fed_at=at, token=token, first=n == 0, unit=u))
    return out


def text_question_layout(
    tokens: SpecialTokens, prefix: Sequence[int], transcript: Sequence[int], question: Sequence[int]
) -> Layout:
    """A typed question about a transcript: prefix, transcript text, question text, then a forced `<|speak|>`.

    The answer follows as native text and ends with `<|turn_eos|>` (or a terminator).  Serving asks and training
    teaches with this same layout; everything after the prefix belongs to unit 0.
    """
    out = Layout()
    out.add(list(prefix), [Kind.PREFIX] * len(prefix), -1)
    text = [*transcript, *question]
    out.add([*text, tokens.speak], [Kind.TRANSCRIPT] * len(text) + [Kind.DECISION], 0)
    return out
