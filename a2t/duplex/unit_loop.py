"""The logic of a unit as a generator: it yields what to feed and is sent the logits. No batch, no clock, no I/O.

Native rules are MiniCPM-o's duplex loop; the side channel follows DESIGN.md section 2:

- it opens where `<|asr_start|>` is the argmax of the logits after the unit's first native token, whatever the sampling
  of native tokens, and decodes greedily;
- it closes with `<|asr_end|>` when the model says so, at `max_transcript_tokens`, when the model predicts anything that
  is not text, or when the engine says `Reply.hurry` (the time for this unit is used up);
- **carry-over**: a segment cut by `hurry` was in the middle of its sentence, and the words not yet written are still in
  the cache as audio.  The loop therefore opens the next unit's segment itself, even where `<|asr_start|>` is not the
  argmax, and the model goes on where it stopped.  The same happens where `hurry` kept a segment from opening at all.

Two things keep forwards few, and neither changes what is decoded:

- the tokens that end a unit are predicted by nobody and ask for nothing: they are **held over** (`take_held`), to be
  fed with the next unit's marker and audio;
- the tokens that will likely come after the audio are **drafted** into the same feed.  The logits after the audio
  confirm `<|listen|>`, those after it `<|asr_start|>`; where the model chooses otherwise the loop takes the rest back
  (`Reply.rejected`).  A choice is made from the same logits and, where it is drawn, by the same draw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from a2t.duplex.decoding import DuplexConfig, NativeDecoder
from a2t.duplex.feeds import PREFILL, ClosedBy, Feed, Reply, Said, Steps, UnitResult
from a2t.duplex.protocol import AUDIO_ID, SpecialTokens, UnitTokens, after_audio
from a2t.kv.kinds import Kind

__all__ = ["Feed", "Reply", "Steps", "UnitLoop", "UnitResult"]


class UnitLoop:
    """One conversation's unit logic. What lives between units (open turn, recent tokens, random state, carry-over) is
    in `state_dict`.

    `decode` turns ids into text and must leave special tokens out.
    """

    DRAFTS = 2  # the most that are fed behind a unit's audio

    def __init__(
        self, tokens: SpecialTokens, decode: Callable[[Sequence[int]], str], config: DuplexConfig | None = None
    ):
        self.tokens, self.decode, self.config = tokens, decode, config or DuplexConfig()
        self.decoder = NativeDecoder(tokens, self.config)
        self.next_unit = 0
        self.turn_open = False
        self.carry_over = False
        self._held: list[tuple[int, Kind]] = []
        self.side_channel = self.config.side_channel and tokens.has_side_channel

    def positions_per_unit(self, audio_per_unit: int) -> int:
        """The most positions that one unit can take."""
        segment = self.config.max_transcript_tokens + 2 if self.side_channel else 0
        return 1 + audio_per_unit + segment + max(self.config.max_new_speak_tokens_per_chunk, 2) + 1

    def prefix(self, ids: Sequence[int]) -> Generator[Feed, Reply, None]:
        """Feeds the system prompt, in pieces that others' feeds have room beside."""
        for start in range(0, len(ids), PREFILL):
            part = list(ids[start : start + PREFILL])
            yield Feed(part, [Kind.PREFIX] * len(part), unit=-1)

    def unit(self, audio_AD: Tensor, force_listen: bool = False) -> Steps:
        """One unit from its audio embeddings [A, D]; returns its result and leaves its last tokens to `take_held`.

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

    def take_held(self) -> tuple[list[int], list[Kind]]:
        """The tokens that end the last unit, not fed yet; they come before anything else."""
        held, self._held = self._held, []
        return [token for token, _ in held], [kind for _, kind in held]

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
        self.index = loop.next_unit
        self.script = ([self.tokens.turn_eos] if loop.turn_open else []) + [self.tokens.listen] if force_listen else []
        self.native: list[int] = []
        self.transcript: list[int] = []
        self.opened = False
        self.closed_by: ClosedBy | None = None
        self.hidden: dict[int, Tensor] = {}  # by index in `native`
        self.reply = Reply()  # the last
        self.drafted: deque[tuple[int, Said]] = deque()  # of the last feed, neither confirmed nor taken back

    def steps(self, audio_AD: Tensor) -> Steps:
        t, loop = self.tokens, self.loop
        n = len(audio_AD)
        ids, kinds = [t.unit] + [AUDIO_ID] * n, [Kind.MARKER] + [Kind.AUDIO] * n
        said = yield from self.feed(ids, kinds, self.likely_first(), audio_AD)
        while True:
            step = len(self.native)
            if self.script:
                token = self.script.pop(0)
            elif step == self.config.max_new_speak_tokens_per_chunk - 1:
                token = t.chunk_eos
            else:
                token = self.choose(said.logits)
            self.native.append(token)
            loop.note(token)
            kind, last = t.native_kind(token), token in t.terminators
            if step == 0 and loop.side_channel:
                assert t.asr_start is not None
                said = yield from self.feed([token], [kind], [(t.asr_start, Kind.ASR)])
                self.remember(step, said)
                said = yield from self.segment(said, last)
            elif last:
                self.hold([token, t.unit_end], [kind, Kind.TERMINATOR])
            else:
                said = yield from self.feed([token], [kind])
                self.remember(step, said)
            if last:
                return self.finish()

    def likely_first(self) -> list[tuple[int, Kind]]:
        """What will likely follow the audio, as far as it pays to draft it."""
        t = self.tokens
        first = self.script[0] if self.script else None if self.loop.turn_open else t.listen
        if first is None or not self.loop.side_channel:
            return []
        assert t.asr_start is not None
        return [(first, t.native_kind(first)), (t.asr_start, Kind.ASR)]

    def feed(
        self,
        ids: list[int],
        kinds: list[Kind],
        drafts: list[tuple[int, Kind]] | None = None,
        audio_AD: Tensor | None = None,
    ) -> Generator[Feed, Reply, Said]:
        """Feeds positions, and `drafts` behind them; returns what is said after the last of `ids`. A token that was
        drafted already is not fed again: its answer is there."""
        if self.drafted and ids == [self.drafted[0][0]]:
            return self.drafted.popleft()[1]
        self.take_back()
        drafts = drafts if drafts and self.config.draft else []
        ids, kinds = ids + [token for token, _ in drafts], kinds + [kind for _, kind in drafts]
        ending = self.native[-1] if self.native else drafts[0][0] if drafts else None
        left = 0 if ending in self.tokens.terminators else self.config.max_new_speak_tokens_per_chunk - len(self.native)
        feed = Feed(ids, kinds, self.index, audio_AD, want=1 + len(drafts), forwards_left=left)
        self.reply = reply = yield feed
        assert reply.logits is not None and len(reply.logits) == feed.want
        hidden = reply.hidden if reply.hidden is not None else [None] * feed.want
        said = [Said(logits, h, reply.hurry) for logits, h in zip(reply.logits, hidden, strict=True)]
        self.drafted.extend((token, answer) for (token, _), answer in zip(drafts, said[1:], strict=True))
        return said[0]

    def take_back(self) -> None:
        """What was drafted and not confirmed is not part of the conversation."""
        self.reply.rejected = len(self.drafted)
        self.drafted.clear()

    def hold(self, ids: list[int], kinds: list[Kind]) -> None:
        """Keeps the unit's last tokens for the next feed."""
        self.take_back()
        self.loop._held = list(zip(ids, kinds, strict=True))

    def remember(self, step: int, said: Said) -> None:
        if said.hidden is not None and self.loop.is_spoken(step, self.native[step]):
            self.hidden[step] = said.hidden

    def choose(self, logits_V: Tensor) -> int:
        """A native token by the model, held to the turn and to the character limit."""
        t, loop = self.tokens, self.loop
        token = loop.decoder.choose(logits_V)
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

    def segment(self, said: Said, ends_unit: bool) -> Generator[Feed, Reply, Said]:
        """The side channel after the first native token, then `</unit>` if that token `ends_unit`. Returns what
        predicts the next native token."""
        t, loop = self.tokens, self.loop
        assert t.asr_start is not None and t.asr_end is not None
        end = ([t.unit_end], [Kind.TERMINATOR]) if ends_unit else ([], [])
        wanted = loop.carry_over or int(said.logits.argmax()) == t.asr_start
        loop.carry_over = wanted and said.hurry
        if not wanted or said.hurry:
            self.closed_by = "budget" if wanted else None
            if ends_unit:
                self.hold(*end)
            return said
        self.opened = True
        ids, kinds = [t.asr_start], [Kind.ASR]
        while self.closed_by is None:
            said = yield from self.feed(ids, kinds)
            token = int(said.logits.argmax())
            if token == t.asr_end:
                self.closed_by, ids, kinds = "model", [], []
            elif not loop.is_text(token):
                self.closed_by, ids, kinds = "control", [], []
            elif said.hurry:
                # The predicted word is not fed: the model will predict it again when the next segment opens.
                self.closed_by, ids, kinds = "budget", [], []
                loop.carry_over = True
            else:
                self.transcript.append(token)
                ids, kinds = [token], [Kind.TRANSCRIPT]
                if len(self.transcript) == self.config.max_transcript_tokens:
                    self.closed_by = "limit"
        ids, kinds = ids + [t.asr_end] + end[0], kinds + [Kind.ASR] + end[1]
        if ends_unit:
            self.hold(ids, kinds)
            return said
        return (yield from self.feed(ids, kinds))

    def finish(self) -> UnitResult:
        result = self.loop.result(self.index, self.native, self.transcript, self.opened)
        result.segment_closed_by = self.closed_by
        if result.speech_ids and self.hidden:
            result.speech_hidden_ND = torch.stack([h for _, h in sorted(self.hidden.items())])
            assert len(result.speech_hidden_ND) == len(result.speech_ids)
        return result
