"""From an utterance's native sequence to the pair that teaches: what the teacher saw and what the student sees.

Both are laid out by `protocol.lay_out`; the student's has the transcript segments in it.  They are aligned by native
prediction event, never by index.  Source: DESIGN.md section 5.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from a2t.distill.config import EvictionSettings
from a2t.distill.packing import View
from a2t.duplex.protocol import Event, Layout, SpecialTokens, UnitTokens, lay_out
from a2t.kv.kinds import Kind
from a2t.kv.ledger import Ledger
from a2t.kv.policies import Policy, make_policy
from a2t.models.scope import SIDE


@dataclass(frozen=True)
class Example:
    """One training stream: an utterance, or several laid end to end.

    `units` are its native tokens with the transcript segment of each unit (None: no words, so the side channel is to
    stay shut).  `audio_AD` are the frozen encoder's embeddings, [units * audio_per_unit, hidden], in any float dtype.
    """

    id: str
    prefix: tuple[int, ...]
    units: tuple[UnitTokens, ...]
    audio_AD: Tensor

    def __post_init__(self) -> None:
        if not self.units or len(self.audio_AD) % len(self.units) or not len(self.audio_AD):
            raise ValueError(
                f"example {self.id!r} has {len(self.audio_AD)} audio embeddings for {len(self.units)} units; "
                "each unit needs the same number, at least one"
            )
        if any(u.segment == () for u in self.units):
            raise ValueError(f"example {self.id!r} has an empty segment; a unit without words has segment None")

    @property
    def audio_per_unit(self) -> int:
        return len(self.audio_AD) // len(self.units)

    @property
    def length(self) -> int:
        """Positions of the student's sequence."""
        return len(self.prefix) + sum(positions_of(u, self.audio_per_unit) for u in self.units)

    @classmethod
    def build(
        cls,
        id: str,
        prefix: Sequence[int],
        native: Sequence[Sequence[int]],
        segments: Sequence[Sequence[int] | None],
        audio_AD: Tensor,
    ) -> Example:
        """From parallel lists, one entry a unit; an empty segment counts as none. ValueError if lengths differ."""
        if len(native) != len(segments):
            raise ValueError(f"example {id!r} has native tokens for {len(native)} units and {len(segments)} segments")
        units = tuple(
            UnitTokens(tuple(n), tuple(s) if s is not None and len(s) else None)
            for n, s in zip(native, segments, strict=True)
        )
        return cls(id, tuple(prefix), units, audio_AD)


def positions_of(unit: UnitTokens, audio_per_unit: int) -> int:
    """Positions that a unit takes: marker, audio, native tokens, the segment with its delimiters, `</unit>`."""
    segment = 0 if unit.segment is None else len(unit.segment) + 2
    return 2 + audio_per_unit + len(unit.native) + segment


class Group(IntEnum):
    """What a native event's fed token was; the balanced losses average within each and then over those present."""

    LISTEN = 0
    SPEAK = 1
    OTHER = 2  # first decisions that are neither
    TURN_END = 3
    CONTINUATION = 4


DECISIONS = (Group.LISTEN, Group.SPEAK, Group.OTHER)
TURNS = (Group.TURN_END, Group.CONTINUATION)


def group_of(tokens: SpecialTokens, event: Event) -> Group:
    if event.first:
        return {tokens.listen: Group.LISTEN, tokens.speak: Group.SPEAK}.get(event.token, Group.OTHER)
    return Group.TURN_END if event.token == tokens.turn_eos else Group.CONTINUATION


@dataclass(frozen=True)
class Pair:
    """The two layouts of an example. `teacher.events[i]` and `student.events[i]` are the same native prediction."""

    example: Example
    teacher: Layout
    student: Layout
    groups: tuple[Group, ...]  # one an event
    targets: tuple[tuple[int, int], ...]  # (student position, the token it is to predict) of the transcription loss


def native_layout(tokens: SpecialTokens, example: Example) -> Layout:
    """What the teacher saw: no segments."""
    return lay_out(tokens, example.prefix, strip_segments(example).units, example.audio_per_unit)


def strip_segments(example: Example) -> Example:
    """The native side alone."""
    return replace(example, units=tuple(replace(u, segment=None) for u in example.units))


def pair(tokens: SpecialTokens, example: Example) -> Pair:
    """Lays out both sides. Raises ValueError if the vocabulary has no side channel."""
    if tokens.asr_start is None or tokens.asr_end is None:
        raise ValueError("this vocabulary has no <|asr_start|> and <|asr_end|>; add the two tokens before training")
    teacher = native_layout(tokens, example)
    student = lay_out(tokens, example.prefix, example.units, example.audio_per_unit)
    assert [(e.unit, e.first, e.token) for e in teacher.events] == [(e.unit, e.first, e.token) for e in student.events]
    groups = tuple(group_of(tokens, e) for e in student.events)
    return Pair(example, teacher, student, groups, tuple(_targets(tokens, example.units, student)))


def _targets(tokens: SpecialTokens, units: Sequence[UnitTokens], student: Layout) -> list[tuple[int, int]]:
    """Where the transcription loss is taken.

    With a segment: from the first decision (whether to open) to the last text token (whether to close).  Without one:
    the first decision, if no native prediction stands there to hold it, is to predict what is fed next.
    """
    out: list[tuple[int, int]] = []
    for event in student.events:
        if not event.first:
            continue
        unit = units[event.unit]
        if unit.segment is not None:
            span = range(event.fed_at, event.fed_at + len(unit.segment) + 2)
            out += [(p, student.ids[p + 1]) for p in span]
            assert out[-1][1] == tokens.asr_end
        elif len(unit.native) == 1:
            out.append((event.fed_at, student.ids[event.fed_at + 1]))
            assert out[-1][1] == tokens.unit_end
    return out


def join(examples: Sequence[Example], id: str | None = None) -> Example:
    """Several examples laid end to end behind one prefix, which all must share (ValueError)."""
    if len({e.prefix for e in examples}) != 1 or len({e.audio_per_unit for e in examples}) != 1:
        raise ValueError(f"examples {[e.id for e in examples]} differ in prefix or embeddings a unit; they cannot join")
    if len(examples) == 1:
        return examples[0]
    units = tuple(u for e in examples for u in e.units)
    audio = torch.cat([torch.as_tensor(e.audio_AD) for e in examples])
    return Example(id or join_id([e.id for e in examples]), examples[0].prefix, units, audio)


def join_id(ids: Sequence[str]) -> str:
    """The id of a joined stream follows from its parts, so that a teacher store made for it is found again."""
    if len(ids) == 1:
        return ids[0]
    return f"{ids[0]}+{len(ids) - 1}-{hashlib.blake2b(chr(10).join(ids).encode(), digest_size=8).hexdigest()}"


# Evictions, simulated

NEVER = 2**31 - 1


def hidden_from(layout: Layout, policy: Policy, budget: int | None) -> list[int]:
    """For each position the first position that no longer sees it, NEVER if all later ones do.

    Replays the ledger and the policy over the layout as the engine does: the policy runs after each unit, and a
    position evicted there is hidden from the next position on.  A query q sees a key k iff k <= q < hidden_from[k].
    """
    hidden = [NEVER] * len(layout)
    ledger = Ledger()
    start = 0
    while start < len(layout):
        unit = layout.units[start]
        stop = start
        while stop < len(layout) and layout.units[stop] == unit:
            stop += 1
        fed = ledger.append(layout.kinds[start:stop], unit)
        assert fed.start == start, "policies that renumber positions cannot be simulated in a mask"
        start = stop
        if unit < 0:
            continue  # the engine evicts after units only
        eviction = policy.plan_eviction(ledger, budget)
        if eviction.rotation is not None or eviction.refeed is not None:
            raise ValueError(f"policy {policy.name!r} rewrites keys that stay: a mask cannot simulate it")
        if eviction.drop:
            for slot in eviction.drop:
                hidden[ledger.positions[slot]] = stop
            ledger.drop(eviction.drop)
    return hidden


def view_of(layout: Layout, gone: Sequence[int] | None, hide_transcript: bool, asr_end: int) -> View | None:
    """What the student's positions see, from `hidden_from` and the scope (a2t.models.scope); None: all before them.

    With `hide_transcript` the side channel's positions are shown to native ones, and to `asr_end`, which predicts the
    native token after it, only from where the audio of their unit is gone.
    """
    if gone is None and not hide_transcript:
        return None
    gone = gone or [NEVER] * len(layout)
    if not hide_transcript:
        return View(gone)
    side = [kind in SIDE for kind in layout.kinds]
    free = [s and id != asr_end for s, id in zip(side, layout.ids, strict=True)]
    heard_until: dict[int, int] = {}
    for kind, unit, until in zip(layout.kinds, layout.units, gone, strict=True):
        if kind == Kind.AUDIO:
            heard_until[unit] = max(until, heard_until.get(unit, 0))
    shown = [heard_until[unit] if s else 0 for s, unit in zip(side, layout.units, strict=True)]
    return View(gone, shown, free)


def draw_budget(settings: EvictionSettings, length: int, *key: object) -> tuple[Policy, int] | None:
    """The policy and budget that a sequence of `length` positions is trained under, None for no eviction. The draw
    follows from `key` (seed, epoch, id), so that a resumed run repeats it."""
    rng = random.Random("/".join(map(str, key)))
    if rng.random() >= settings.probability:
        return None
    policy = make_policy(settings.policy, **settings.options)
    if rng.random() < settings.floor:
        return policy, 0
    return policy, rng.randint(settings.low, max(settings.low, min(settings.high, length)))
