"""The kind of a resident position; the kind alone decides whether it may be evicted (DESIGN.md section 2)."""

from enum import IntEnum


class Kind(IntEnum):
    PREFIX = 0  # system prompt
    MARKER = 1  # <unit>
    AUDIO = 2  # one audio embedding
    DECISION = 3  # <|listen|>, <|speak|> as the first native decision of a unit
    ASR = 4  # <|asr_start|>, <|asr_end|>
    TERMINATOR = 5  # <|chunk_eos|>, <|chunk_tts_eos|>, <|turn_eos|>, </unit>
    TRANSCRIPT = 6  # text between the asr delimiters
    RESPONSE = 7  # what the model answers

    @property
    def evictable(self) -> bool:
        return self in EVICTABLE


EVICTABLE = frozenset({Kind.MARKER, Kind.AUDIO, Kind.DECISION, Kind.ASR, Kind.TERMINATOR})
TEXT = frozenset({Kind.TRANSCRIPT, Kind.RESPONSE})
