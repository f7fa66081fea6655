"""What a corpus had that no manifest can hold as it is: counted by kind, with examples, and added up over parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEFT_OUT = {
    "unreadable audio": "the file is damaged, cut off or no audio",
    "no audio": "a transcript names an utterance whose audio is not there",
    "no text": "audio that no transcript names, or a transcript without a word",
    "unreadable text": "the transcript is not UTF-8",
    "no alignment": "no alignment names the utterance",
    "unreadable alignment": "the alignment breaks its own format",
    "aligner failed": "the aligner found no path through the audio",
    "duplicate": "an earlier utterance has the same id",
}
"""Utterances that the manifest lacks; the report names every one."""

MENDED = {
    "unknown word": "the alignment has <unk>: the text's word is taken, with the alignment's times",
    "other spelling": "the alignment has another word there: the text's word is taken, with the alignment's times",
    "word not aligned": "the alignment lacks the word: it gets a share of the gap between its neighbours",
    "word not in text": "the alignment has a word that the text lacks: it is not in the manifest",
    "no letters": "a token of the text has neither letter nor digit: it is not in the manifest",
    "past the end": "the times go on after the audio ends: cut to its end",
    "before the start": "the times begin before the audio does: cut to its start",
    "out of order": "the word stands before one that begins earlier: put in order of time",
    "overlap": "the word begins before the last one has ended: it begins at that end",
    "no duration": "the word ends where it begins, or before: it ends where it begins",
    "empty silence": "a silence of no duration: left out, as silences are",
}
"""What was changed about utterances that are in the manifest."""

BESIDE = {
    "unused alignment": "an alignment of an utterance that the corpus lacks",
    "spelled by rule": "the aligner's dictionary lacks the word: its sounds were guessed from its letters",
}
KINDS = {**LEFT_OUT, **MENDED, **BESIDE}
EXAMPLES = 5


@dataclass
class Findings:
    """`examples`: every one of the utterances left out, the first few of anything else."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def note(self, kind: str, where: str, times: int = 1) -> None:
        assert kind in KINDS, kind
        if times:
            self.counts[kind] += times
            self._exemplify(kind, [where])

    def add(self, other: Findings) -> None:
        self.counts.update(other.counts)
        for kind, found in other.examples.items():
            self._exemplify(kind, found)

    @property
    def left_out(self) -> int:
        return sum(self.counts[kind] for kind in LEFT_OUT)

    def _exemplify(self, kind: str, found: list[str]) -> None:
        seen = self.examples.setdefault(kind, [])
        seen += found if kind in LEFT_OUT else found[: max(0, EXAMPLES - len(seen))]

    def to_json(self) -> dict[str, Any]:
        return {
            kind: {"count": self.counts[kind], "means": KINDS[kind], "examples": self.examples[kind]}
            for kind in KINDS
            if self.counts[kind]
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Findings:
        return cls(
            Counter({kind: found["count"] for kind, found in saved.items()}),
            {kind: list(found["examples"]) for kind, found in saved.items()},
        )
