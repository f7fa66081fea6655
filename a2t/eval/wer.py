"""Word error rates and when words were written.

A rate is only comparable beside the name of the normaliser that made it: `WordErrors` prints both.
"""

from __future__ import annotations

import unicodedata
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jiwer

Normaliser = Callable[[str], str]


def _nfkc_lower(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())


def _nfkc_lower_punctuation(text: str) -> str:
    """Punctuation becomes space: "mm-hmm" is two words."""
    text = unicodedata.normalize("NFKC", text).lower()
    return " ".join("".join(" " if unicodedata.category(c).startswith("P") else c for c in text).split())


NORMALISERS: dict[str, Normaliser] = {
    "nfkc-lower": _nfkc_lower,
    "nfkc-lower-punctuation": _nfkc_lower_punctuation,
}


def normaliser(name: str, spellings: Mapping[str, str] | None = None) -> Normaliser:
    """`nfkc-lower`, `nfkc-lower-punctuation`, `whisper-english`.

    Whisper's English normaliser needs its table of British to American spellings (`normalizer.json` of a Whisper
    checkpoint) and is refused without one, since the rate would differ from what others report under that name.
    """
    if name == "whisper-english":
        if spellings is None:
            raise ValueError(
                "whisper-english needs `spellings`: load normalizer.json of a Whisper checkpoint "
                "(or pass {} to do without, and say so beside the number)"
            )
        from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

        return EnglishTextNormalizer(dict(spellings))
    if name not in NORMALISERS:
        raise ValueError(f"normaliser {name!r} is not one of {', '.join([*NORMALISERS, 'whisper-english'])}")
    return NORMALISERS[name]


@dataclass(frozen=True)
class WordErrors:
    """Corpus counts: errors are summed over all texts before dividing."""

    substitutions: int
    deletions: int
    insertions: int
    words: int  # in the references
    normaliser: str

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """A fraction, above 1 with many insertions; ValueError without a reference word."""
        if not self.words:
            raise ValueError("the references hold no word, so there is no word error rate")
        return self.errors / self.words

    def __str__(self) -> str:
        return f"WER {100 * self.rate:.2f} % over {self.words:,} words ({self.normaliser})"


def word_errors(
    references: Sequence[str],
    hypotheses: Sequence[str],
    normalise: str = "nfkc-lower-punctuation",
    spellings: Mapping[str, str] | None = None,
) -> WordErrors:
    """Corpus word errors through jiwer. `references` and `hypotheses` pair up; ValueError if they do not."""
    if len(references) != len(hypotheses):
        raise ValueError(f"{len(references)} references but {len(hypotheses)} hypotheses: give one for each")
    clean = normaliser(normalise, spellings)
    if not references:
        return WordErrors(0, 0, 0, 0, normalise)
    out = jiwer.process_words([clean(r) for r in references], [clean(h) for h in hypotheses])
    words = out.hits + out.substitutions + out.deletions
    return WordErrors(out.substitutions, out.deletions, out.insertions, words, normalise)


@dataclass(frozen=True)
class TimedWord:
    word: str
    time: float  # seconds: the acoustic end of a spoken word, or when a written word was out


@dataclass(frozen=True)
class Match:
    """One step of an alignment: indices into reference and hypothesis, None on the side where the word is missing."""

    reference: int | None
    hypothesis: int | None
    correct: bool


def align_in_time(reference: Sequence[TimedWord], hypothesis: Sequence[TimedWord]) -> list[Match]:
    """The alignment of fewest edits and, among those, of the least total time between matched words.

    Plain edit alignments pair a lost "the" with another one half a minute later where both cost the same; a delay
    measured on such a pair means nothing.  The edit count equals jiwer's.
    """
    n, m = len(reference), len(hypothesis)
    # each word costs at most 60 s of tie-break, so that all of them together stay below one edit
    tie = 0.5 / (60.0 * (n + m + 1))
    cost = array("d", range(m + 1))
    steps = [bytearray(m + 1) for _ in range(n + 1)]  # 0 both, 1 deletion, 2 insertion
    steps[0][1:] = b"\x02" * m
    for i, ref in enumerate(reference, 1):
        diagonal, cost[0] = cost[0], float(i)
        row, left = steps[i], cost[0]
        row[0] = 1
        for j, hyp in enumerate(hypothesis, 1):
            up = cost[j]
            best = diagonal + tie * min(60.0, abs(hyp.time - ref.time)) + (ref.word != hyp.word)
            step = 0
            if up + 1.0 < best:
                best, step = up + 1.0, 1
            if left + 1.0 < best:
                best, step = left + 1.0, 2
            diagonal, left = up, best
            cost[j], row[j] = best, step
    out: list[Match] = []
    i, j = n, m
    while i or j:
        step = steps[i][j]
        i, j = i - (step != 2), j - (step != 1)
        same = step == 0 and reference[i].word == hypothesis[j].word
        out.append(Match(i if step != 2 else None, j if step != 1 else None, same))
    return out[::-1]


def emission_delays(reference: Sequence[TimedWord], hypothesis: Sequence[TimedWord]) -> list[float]:
    """Seconds from each correctly written word's acoustic end to the moment it was out, in spoken order.

    A written word's time is the end of the unit in which it was written plus that unit's processing time, as the
    paper counts.
    """
    pairs = (p for p in align_in_time(reference, hypothesis) if p.correct)
    return [
        hypothesis[p.hypothesis].time - reference[p.reference].time
        for p in pairs
        if p.hypothesis is not None and p.reference is not None
    ]
