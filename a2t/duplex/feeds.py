"""What passes between a unit loop and whoever feeds the model: feeds, replies, held-over tokens, a unit's result."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from a2t.duplex.protocol import UnitTokens
from a2t.kv.kinds import Kind

ClosedBy = Literal["model", "limit", "control", "budget"]


@dataclass
class Feed:
    """Positions to feed at once. The logits of the `want` last ones are asked for."""

    ids: list[int]  # AUDIO_ID where a row of `audio_AD` goes
    kinds: list[Kind]
    unit: int  # -1 for the prefix
    audio_AD: Tensor | None = None
    want: int = 0
    positions: list[int] | None = None  # where a cache is rebuilt with gaps; None: the next ones
    units: list[int] | None = None  # of each position, where they differ; None: all of `unit`
    forwards_left: int = 0
    """The most that the unit may need after this one if its side channel closes now: what the engine keeps time for."""

    def first(self, n: int) -> Feed:
        """Its first n positions, which hold all of its audio; their last one's logits are wanted."""
        units = None if self.units is None else self.units[:n]
        want = max(0, self.want - (len(self.ids) - n))
        return replace(self, ids=self.ids[:n], kinds=self.kinds[:n], units=units, want=want)


@dataclass
class Reply:
    """The engine's answer to a Feed: logits [W, V] and final hidden states [W, D] of its `want` last positions."""

    logits: Tensor | None = None
    hidden: Tensor | None = None
    hurry: bool = False  # the side channel's time is used up: close the segment now, carry over the rest
    rejected: int = 0  # written by the loop: how many of the last positions were drafted in vain, to be taken back


class Said(NamedTuple):
    """What the model says after one position: logits [V], final hidden state [D]."""

    logits: Tensor
    hidden: Tensor | None
    hurry: bool


@dataclass(frozen=True)
class Held:
    """The tokens that end a conversation's last unit: in its ledger, not yet fed; the next feed begins with them.

    `leaving`: slots that the policy evicted after that unit. These tokens still see them, what comes after does not;
    they leave the arena with the feed.
    """

    ids: tuple[int, ...]
    kinds: tuple[Kind, ...]
    unit: int
    first: int  # their first position; consecutive
    leaving: tuple[int, ...] = ()

    @property
    def positions(self) -> range:
        return range(self.first, self.first + len(self.ids))

    def before(self, feed: Feed) -> Feed:
        """Both as one feed."""
        units = feed.units or [feed.unit] * len(feed.ids)
        return replace(
            feed,
            ids=[*self.ids, *feed.ids],
            kinds=[*self.kinds, *feed.kinds],
            units=[self.unit] * len(self.ids) + units,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Held:
        kinds = tuple(Kind(kind) for kind in saved["kinds"])
        return cls(tuple(saved["ids"]), kinds, saved["unit"], saved["first"], tuple(saved["leaving"]))


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
    segment_closed_by: ClosedBy | None = None
    speech_ids: list[int] = field(default_factory=list)
    """What a speech decoder is given, as MiniCPM-o's is: every native token that is no terminator (a `<|turn_eos|>`
    included), the first one only where it is text."""
    speech_hidden_ND: Tensor | None = None  # final hidden states of `speech_ids`; None if there are none

    @property
    def side_channel_skipped(self) -> bool:
        """Whether there was no time to write what was heard: the segment was cut, or (`segment_opened` False) did not
        open. It goes on in the next unit."""
        return self.segment_closed_by == "budget"

    @property
    def tokens(self) -> UnitTokens:
        """The unit as `protocol.after_audio` lays it out."""
        return UnitTokens(tuple(self.native_ids), tuple(self.transcript_ids) if self.segment_opened else None)


PREFILL = 256
"""Positions of a long text that are fed at once."""

Steps = Generator[Feed, Reply, UnitResult]
