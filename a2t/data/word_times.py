"""A text and an alignment of it become words with times: all of the text's words, each with times that can be.

The text says which words there are, the alignment when.  Where they do not agree, and where the times cannot be, the
words are mended and the mending is counted (findings.py).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from a2t.data.findings import Findings
from a2t.data.manifest import SLACK, Word

SILENCES = frozenset({"", "sil", "sp", "<eps>", "<sil>"})
UNKNOWN = frozenset({"<unk>", "unk", "spn", "<spn>", "[unk]"})


@dataclass(frozen=True)
class Interval:
    """A stretch of an alignment: a word, or one of SILENCES or UNKNOWN."""

    label: str
    start: float
    end: float


def key(word: str) -> str:
    """What two spellings of a word have in common: its letters, digits and inner apostrophes, in lower case."""
    word = unicodedata.normalize("NFKC", word).lower().replace("’", "'")
    return "".join(c for c in word if c.isalnum() or c == "'").strip("'")


def words_of(
    text: str, intervals: Sequence[Interval], seconds: float, where: str, findings: Findings
) -> tuple[Word, ...]:
    """The words of `text`, in order, within an audio of `seconds`. A text in capitals alone becomes lower case.

    Times never go backwards and never leave the audio; a word's end is never moved to before it was heard out.
    """
    words = (text.lower() if text.isupper() else text).split()
    kept = [w for w in words if key(w)]
    findings.note("no letters", where, len(words) - len(kept))
    spoken = _mend(intervals, seconds, where, findings)
    out: list[Word] = []
    steps = SequenceMatcher(None, [key(w) for w in kept], [_sound(i) for i in spoken], autojunk=False).get_opcodes()
    for step, a, b, c, d in steps:
        if step == "insert":
            findings.note("word not in text", f"{where}: {' '.join(i.label for i in spoken[c:d])}", d - c)
        elif b - a == d - c:
            for word, i in zip(kept[a:b], spoken[c:d], strict=True):
                if step == "replace":
                    kind = "unknown word" if i.label.lower() in UNKNOWN else "other spelling"
                    findings.note(kind, f"{where}: {word}")
                out.append(Word(word, i.start, i.end))
        else:
            begin = spoken[c].start if c < d else out[-1].end if out else 0.0
            end = spoken[d - 1].end if c < d else spoken[c].start if c < len(spoken) else seconds
            kind = "other spelling" if c < d else "word not aligned"
            findings.note(kind, f"{where}: {' '.join(kept[a:b])}", b - a)
            out += _share(kept[a:b], begin, max(begin, end))
    return tuple(out)


def _sound(interval: Interval) -> str:
    return "<unk>" if interval.label.lower() in UNKNOWN else key(interval.label)


def _share(words: Sequence[str], begin: float, end: float) -> list[Word]:
    """The stretch divided by letters."""
    letters = sum(map(len, words))
    out, at = [], begin
    for n, word in enumerate(words):
        until = end if n == len(words) - 1 else min(end, at + (end - begin) * len(word) / letters)
        out.append(Word(word, at, until))
        at = until
    return out


def _mend(intervals: Sequence[Interval], seconds: float, where: str, findings: Findings) -> list[Interval]:
    """The words alone, in order of time, one after another, within the audio."""
    spoken = []
    for i in intervals:
        if i.label.lower() not in SILENCES:
            spoken.append(i)
        elif i.end <= i.start:
            findings.note("empty silence", where)
    begins = [i.start for i in spoken]
    for i, following in zip(spoken, begins[1:], strict=False):
        if following < i.start:
            findings.note("out of order", f"{where}: {i.label}")
    out: list[Interval] = []
    last = 0.0
    for i in sorted(spoken, key=lambda i: (i.start, i.end)):
        name = f"{where}: {i.label} {i.start:g} to {i.end:g} of {seconds:g} s"
        start, end = i.start, i.end
        if start < 0:
            findings.note("before the start", name)
            start = 0.0
        if max(start, end) > seconds + SLACK:
            findings.note("past the end", name)
        start, end = min(start, seconds), min(end, seconds)
        if out and start < last - SLACK:
            findings.note("overlap", name)
        start = max(start, last)
        if end <= start:
            if i.end <= i.start:  # otherwise it is one of the kinds above
                findings.note("no duration", name)
            end = start
        out.append(Interval(i.label, start, end))
        last = end
    return out
