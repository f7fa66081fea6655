"""A quick look at an adapter while it trains: word errors and takeovers on a small held-out set.

Counts, not rates, so that several workers can each stream a share of the rows and add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from a2t.audio.files import read_audio
from a2t.data.manifest import Manifest, Row
from a2t.duplex.engine import Engine, EngineConfig
from a2t.eval.embedded import TurnTaking, transcription, turn_taking
from a2t.eval.streaming import System, stream_session
from a2t.models.base import DuplexModel

POSITIONS_PER_UNIT = 40


@dataclass(frozen=True)
class Tally:
    """Errors of words, takeovers of chances to take over; they add up."""

    errors: float = 0
    words: float = 0
    pause: float = 0
    pauses: float = 0
    backchannel: float = 0
    backchannels: float = 0
    turn_end: float = 0
    turn_ends: float = 0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))

    def counts(self) -> list[float]:
        return [float(getattr(self, n)) for n in self.names()]

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(self.counts(), other.counts(), strict=True)))

    def figures(self) -> dict[str, float]:
        """WER, takeover by kind of moment, and `score` (lower is better): WER + wrong takeovers + turns not taken.
        What the rows have no chance of (no pauses, say) is left out."""
        out = {"words": self.words}
        terms = []
        for name, hits, of in (
            ("wer", self.errors, self.words),
            ("takeover_pause", self.pause, self.pauses),
            ("takeover_backchannel", self.backchannel, self.backchannels),
            ("takeover_turn_end", self.turn_end, self.turn_ends),
        ):
            if of:
                out[name] = hits / of
                terms.append(1 - out[name] if name == "takeover_turn_end" else out[name])
        return {**out, "score": sum(terms)}


def tally(
    model: DuplexModel, manifest: str | Path, rows: Sequence[Row], budget: int | None = 4000, side_channel: bool = True
) -> Tally:
    """Streams `rows` of `manifest` as they would be heard live, under the policy a2t with `budget`."""
    out = Tally()
    system = System("validation", "student", "a2t", budget, side_channel)
    for row in rows:
        pcm_S = read_audio(Manifest.audio_path(manifest, row))
        engine = Engine(
            model, 1, row.units() * POSITIONS_PER_UNIT + 1024, config=EngineConfig(side_channel_budget_s=None)
        )
        run = stream_session(engine, system, row, pcm_S)
        words = transcription([(row, run)]).errors
        out += Tally(words.errors, words.words, *_takeovers(turn_taking(row, run)))
    return out


def _takeovers(turns: TurnTaking) -> tuple[float, ...]:
    rates = (turns.pause, turns.backchannel, turns.turn_end)
    return tuple(float(x) for r in rates for x in (r.hits, r.of))
