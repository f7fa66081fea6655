"""Unit sequences for the property tests, laid out by the grammar, and the eviction rules once more, plainly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from a2t.duplex.protocol import SpecialTokens, UnitTokens, after_audio
from a2t.kv.kinds import EVICTABLE, TEXT, Kind
from a2t.kv.ledger import Ledger

TOKENS = SpecialTokens(
    unit=1,
    unit_end=2,
    listen=3,
    speak=4,
    tts_bos=5,
    tts_pad=6,
    chunk_eos=7,
    chunk_tts_eos=8,
    turn_eos=9,
    asr_start=10,
    asr_end=11,
)
WORD = 100


@dataclass(frozen=True)
class Step:
    """One unit: the kinds of its positions, and whether the policy runs after it."""

    kinds: list[Kind]
    evict: bool


def decode_step(byte: int, audio: int = 3) -> Step:
    """A byte is a unit: listen or speak, a segment of 0..7 words or none, a response of 1..4 words, eviction or not."""
    speak, opened, words, answer, evict = byte & 1, byte & 2, byte >> 2 & 7, byte >> 5 & 3, byte & 128
    segment = (WORD,) * words if opened else None
    native = (TOKENS.speak, *(WORD,) * (answer + 1), TOKENS.chunk_eos) if speak else (TOKENS.listen,)
    _, kinds = after_audio(TOKENS, UnitTokens(native, segment))
    return Step([Kind.MARKER] + [Kind.AUDIO] * audio + kinds, not evict)


class Held(NamedTuple):
    position: int
    kind: Kind
    unit: int


class PlainA2T:
    """DESIGN.md section 2, with lists and loops: what stays after each step."""

    def __init__(self, budget: int, retention_units: int, fold: bool) -> None:
        self.budget, self.retention_units, self.fold = budget, retention_units, fold
        self.held: list[Held] = []
        self.next_position = 0

    def feed(self, kinds: list[Kind], unit: int) -> None:
        self.held += [Held(self.next_position + n, kind, unit) for n, kind in enumerate(kinds)]
        self.next_position += len(kinds)

    def evict(self, newest_unit: int) -> None:
        kinds_in_order = [EVICTABLE] + ([TEXT] if self.fold else [])
        for leaving in kinds_in_order:
            while len(self.held) > self.budget:
                old = [h.unit for h in self.held if h.kind in leaving and h.unit <= newest_unit - self.retention_units]
                if not old:
                    break
                oldest = min(old)
                self.held = [h for h in self.held if not (h.unit == oldest and h.kind in leaving)]


def residents(ledger: Ledger) -> set[Held]:
    return set(map(Held, ledger.positions, ledger.kinds, ledger.units))
