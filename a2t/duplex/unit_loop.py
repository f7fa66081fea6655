"""The logic of a unit as a generator: it yields what to feed and is sent the logits. No batch, no clock, no I/O.

Native rules are MiniCPM-o's duplex loop; the side channel follows DESIGN.md section 2:

- it opens where `<|asr_start|>` is the argmax of the logits after the unit's first native token, whatever the sampling
  of native tokens, and decodes greedily;
- it closes with `<|asr_end|>` when the model says so, at `max_transcript_tokens`, when the model predicts anything that
  is not text, or when the engine says `Reply.hurry` (the time for this unit is used up);
- **carry-over**: a segment cut by `hurry` was in the middle of its sentence, and the words not yet written are still in
  the cache as audio.  The loop therefore opens the next unit's segment itself, even where `<|asr_start|>` is not the
  argmax, and the model goes on where it stopped.  The same happens where `hurry` kept a segment from opening at all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from a2t.duplex.decoding import DuplexConfig, NativeDecoder
from a2t.duplex.protocol import AUDIO_ID, SpecialTokens, UnitTokens, after_audio
from a2t.kv.kinds import Kind

ClosedBy = Literal["model", "limit", "control", "budget"]


@dataclass
class Feed:
    """Positions to feed at once. `want` trailing positions' logits are asked for (0 or 1)."""

    ids: list[int]  # AUDIO_ID where a row of `audio_AD` goes
    kinds: list[Kind]
    unit: int  # -1 for the prefix
    audio_AD: Tensor | None = None
    want: int = 0
    positions: list[int] | None = None  # where a cache is rebuilt with gaps; None: the next ones
    units: list[int] | None = None  # of each position, where they differ; None: all of `unit`


@dataclass
class Reply:
    """The engine's answer to a Feed: logits [V] and final hidden state [D] of its last position, if it wanted them."""

    logits: Tensor | None = None
    hidden: Tensor | None = None
    hurry: bool = False  # the side channel's time is used up: close the segment now, carry over the rest


@dataclass
class UnitResult:
    unit: int
    listening: bool  # the unit ended on <|listen|>
    decision: int  # first native token
    end_of_turn: bool
    native_ids: list[int]  # as fed, first decision .. terminator, without </unit>
    response_ids: list[int] = field(default_factory=list)  # text tokens of the response
    response_text: str = ""
    transcript_ids: list[int] = field(default_factory=list)
    transcript_text: str = ""
    segment_opened: bool = False
    segment_closed_by: ClosedBy | None = None  # "budget" with segment_opened False: there was no time to open it
    speech_ids: list[int] = field(default_factory=list)
    """What a speech decoder is given, as MiniCPM-o's is: every native token that is no terminator (a `<|turn_eos|>`
    included), the first one only where it is text."""
    speech_hidden_ND: Tensor | None = None  # final hidden states of `speech_ids`; None if there are none

    @property
    def tokens(self) -> UnitTokens:
        """The unit as `protocol.after_audio` lays it out."""
        return UnitTokens(tuple(self.native_ids), tuple(self.transcript_ids) if self.segment_opened else None)


Steps = Generator[Feed, Reply, UnitResult]


class UnitLoop:
    """One conversation's unit logic. What lives between units (open turn, recent tokens, random state, carry-over) is
    in `state_dict`.

    `decode` turns ids into text and must leave special tokens out.
    """

    def __init__(
        self, tokens: SpecialTokens, decode: Callable[[Sequence[int]], str], config: DuplexConfig | None = None
    ):
        self.tokens, self.decode, self.config = tokens, decode, config or DuplexConfig()
        self.decoder = NativeDecoder(tokens, self.config)
        self.next_unit = 0
        self.turn_open = False
        self.carry_over = False
        self.side_channel = self.config.side_channel and tokens.has_side_channel

    def positions_per_unit(self, audio_per_unit: int) -> int:
        """The most positions that one unit can take."""
        segment = self.config.max_transcript_tokens + 2 if self.side_channel else 0
        return 1 + audio_per_unit + segment + max(self.config.max_new_speak_tokens_per_chunk, 2) + 1

    def prefix(self, ids: Sequence[int]) -> Generator[Feed, Reply, None]:
        """Feeds the system prompt."""
        if ids:
            yield Feed(list(ids), [Kind.PREFIX] * len(ids), unit=-1)

    def unit(self, audio_AD: Tensor, force_listen: bool = False) -> Steps:
        """One unit from its audio embeddings [A, D]; returns its result.

        `force_listen` lets the model listen whatever it predicts; an open turn is closed with `<|turn_eos|>` first.
        """
        run = _Unit(self, force_listen)
        self.next_unit += 1
        return run.steps(audio_AD)

    def replay(self, audio_AD: Tensor, unit: UnitTokens) -> Steps:
        """Feeds a unit that is already known, in one piece, and leaves the loop as if it had been decoded (the random
        state apart): how a journal is rebuilt and a native sequence forced."""
        index = self.next_unit
        self.next_unit += 1
        ids, kinds = after_audio(self.tokens, unit)
        n = len(audio_AD)
        yield Feed([self.tokens.unit] + [AUDIO_ID] * n + ids, [Kind.MARKER] + [Kind.AUDIO] * n + kinds, index, audio_AD)
        for token in unit.native:
            self.note(token)
        return self.result(index, list(unit.native), list(unit.segment or ()), unit.segment is not None)

    def note(self, token: int) -> None:
        """Keeps track of the turn: text and `<|speak|>` open it, `<|turn_eos|>` closes it, terminators leave it."""
        if token == self.tokens.turn_eos:
            self.turn_open = False
        elif token not in self.tokens.terminators:
            self.turn_open = True

    def is_text(self, token: int) -> bool:
        """Special tokens that this protocol does not name decode to nothing; they are no text either."""
        return token not in self.tokens.control and self.decode([token]) != ""

    def result(self, unit: int, native: list[int], transcript: list[int], opened: bool) -> UnitResult:
        t = self.tokens
        forced_close = native == [t.turn_eos, t.listen]  # MiniCPM-o reports a unit that only listens as no end of turn
        speech = [i for n, i in enumerate(native) if i not in t.terminators and self.is_spoken(n, i)]
        spoken = [i for i in native if i not in t.terminators]
        response = [i for i in speech if self.is_text(i)]
        return UnitResult(
            unit=unit,
            listening=native[-1] == t.listen,
            decision=native[0],
            end_of_turn=bool(spoken) and spoken[-1] == t.turn_eos and not forced_close,
            native_ids=native,
            response_ids=response,
            response_text=self.decode(response) if response else "",
            transcript_ids=transcript,
            transcript_text=self.decode(transcript) if transcript else "",
            segment_opened=opened,
            speech_ids=speech,
        )

    def is_spoken(self, index: int, token: int) -> bool:
        """Whether the native token at `index` of its unit goes to text and speech."""
        if index:
            return True
        return self.config.first_token_is_text and token not in self.tokens.control

    def state_dict(self) -> dict[str, Any]:
        """JSON values that restore the loop exactly between two units."""
        return {
            "next_unit": self.next_unit,
            "turn_open": self.turn_open,
            "carry_over": self.carry_over,
            "decoder": self.decoder.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_unit, self.turn_open, self.carry_over = state["next_unit"], state["turn_open"], state["carry_over"]
        self.decoder.load_state_dict(state["decoder"])


class _Unit:
    """One run through a unit."""

    def __init__(self, loop: UnitLoop, force_listen: bool):
        self.loop, self.tokens, self.config = loop, loop.tokens, loop.config
        self.index, self.force_listen = loop.next_unit, force_listen
        self.native: list[int] = []
        self.transcript: list[int] = []
        self.opened = False
        self.closed_by: ClosedBy | None = None
        self.hidden: dict[int, Tensor] = {}  # by index in `native`

    def feed(self, ids: list[int], kinds: list[Kind], want: int = 1) -> Feed:
        return Feed(ids, kinds, self.index, want=want)

    def steps(self, audio_AD: Tensor) -> Steps:
        t, loop = self.tokens, self.loop
        n = len(audio_AD)
        ids, kinds = [t.unit] + [AUDIO_ID] * n, [Kind.MARKER] + [Kind.AUDIO] * n
        reply = yield Feed(ids, kinds, self.index, audio_AD, want=1)
        script = ([t.turn_eos] if loop.turn_open else []) + [t.listen] if self.force_listen else []
        while True:
            step = len(self.native)
            if script:
                token = script.pop(0)
            elif step == self.config.max_new_speak_tokens_per_chunk - 1:
                token = t.chunk_eos
            else:
                token = self.choose(reply)
            self.native.append(token)
            loop.note(token)
            kind = t.native_kind(token)
            last = token in t.terminators
            if step == 0 and loop.side_channel:
                reply = yield self.feed([token], [kind])
                self.remember(step, reply)
                reply = yield from self.segment(reply, last)
                if last:
                    break
            elif last:
                yield self.feed([token, t.unit_end], [kind, Kind.TERMINATOR], want=0)
                break
            else:
                reply = yield self.feed([token], [kind])
                self.remember(step, reply)
        return self.finish()

    def remember(self, step: int, reply: Reply) -> None:
        if reply.hidden is not None and self.loop.is_spoken(step, self.native[step]):
            self.hidden[step] = reply.hidden

    def choose(self, reply: Reply) -> int:
        """A native token by the model, held to the turn and to the character limit."""
        t, loop = self.tokens, self.loop
        assert reply.logits is not None
        token = loop.decoder.choose(reply.logits)
        if token == t.listen and loop.turn_open:
            token = t.tts_bos
        limit = self.config.chunk_char_limit
        if limit is not None and self.native and token not in t.terminators:
            text = [i for n, i in enumerate(self.native) if loop.is_spoken(n, i)] + [token]
            if len(loop.decode([i for i in text if i not in t.control])) >= limit:
                # MiniCPM-o counts the token that it refuses as the turn going on.
                loop.turn_open = True
                return t.chunk_eos
        return token

    def segment(self, reply: Reply, ends_unit: bool) -> Generator[Feed, Reply, Reply]:
        """The side channel after the first native token, then `</unit>` if that token `ends_unit`. Returns the reply
        whose logits predict the next native token."""
        t, loop = self.tokens, self.loop
        assert t.asr_start is not None and t.asr_end is not None and reply.logits is not None
        end = ([t.unit_end], [Kind.TERMINATOR]) if ends_unit else ([], [])
        wanted = loop.carry_over or int(reply.logits.argmax()) == t.asr_start
        loop.carry_over = wanted and reply.hurry
        if not wanted or reply.hurry:
            self.closed_by = "budget" if wanted else None
            if ends_unit:
                yield self.feed(*end, want=0)
            return reply
        self.opened = True
        ids, kinds = [t.asr_start], [Kind.ASR]
        while self.closed_by is None:
            reply = yield self.feed(ids, kinds)
            assert reply.logits is not None
            token = int(reply.logits.argmax())
            if token == t.asr_end:
                self.closed_by, ids, kinds = "model", [], []
            elif not loop.is_text(token):
                self.closed_by, ids, kinds = "control", [], []
            elif reply.hurry:
                # The predicted word is not fed: the model will predict it again when the next segment opens.
                self.closed_by, ids, kinds = "budget", [], []
                loop.carry_over = True
            else:
                self.transcript.append(token)
                ids, kinds = [token], [Kind.TRANSCRIPT]
                if len(self.transcript) == self.config.max_transcript_tokens:
                    self.closed_by = "limit"
        return (yield self.feed(ids + [t.asr_end] + end[0], kinds + [Kind.ASR] + end[1], want=0 if ends_unit else 1))

    def finish(self) -> UnitResult:
        result = self.loop.result(self.index, self.native, self.transcript, self.opened)
        result.segment_closed_by = self.closed_by
        if result.speech_ids and self.hidden:
            result.speech_hidden_ND = torch.stack([h for _, h in sorted(self.hidden.items())])
            assert len(result.speech_hidden_ND) == len(result.speech_ids)
        return result
