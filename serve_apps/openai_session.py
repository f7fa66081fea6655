"""What a client of the OpenAI realtime dialect may set, and the session object that it is shown."""

from __future__ import annotations

from typing import Any

from serve_apps.limits import MAX_PROMPT_CHARS, WireError
from serve_apps.openai_audio import RATES

Fields = dict[str, Any]
DECIDES_ITSELF: Fields = {
    "type": "semantic_vad",
    "eagerness": "auto",
    "create_response": True,
    "interrupt_response": True,
}


class Settings:
    """The session object: what the client sent, merged over the defaults, with what this server holds to."""

    def __init__(self, model: str):
        self._shown: Fields = {
            "type": "realtime",
            "object": "realtime.session",
            "model": model,
            "output_modalities": ["audio"],
            "instructions": "",
            "audio": {
                "input": {"format": {"type": "audio/pcm"}, "transcription": {"model": model}, "noise_reduction": None},
                "output": {"format": {"type": "audio/pcm"}, "voice": "default", "speed": 1.0},
            },
            "tools": [],
            "tool_choice": "auto",
            "max_output_tokens": "inf",
            "truncation": "auto",
        }
        self._settle({"audio": {"input": {"turn_detection": DECIDES_ITSELF}}})

    def update(self, given: object) -> None:
        """Merges a client's `session`; fields that mean nothing here are only echoed. Raises WireError."""
        if not isinstance(given, dict):
            raise WireError("invalid_event", "session must be an object")
        instructions = given.get("instructions")
        if isinstance(instructions, str) and len(instructions) > MAX_PROMPT_CHARS:
            limit = f"{len(instructions)} characters of instructions; the limit is {MAX_PROMPT_CHARS}"
            raise WireError("invalid_config", limit)
        self._settle(given)

    def shown(self, session_id: str) -> Fields:
        return {**self._shown, "id": session_id}

    @property
    def instructions(self) -> str | None:
        text = self._shown["instructions"]
        return text if isinstance(text, str) and text.strip() else None

    @property
    def heard(self) -> str:
        """Kind of the audio that comes in."""
        return self._shown["audio"]["input"]["format"]["type"]

    @property
    def output(self) -> Fields:
        return self._shown["audio"]["output"]

    @property
    def speaks(self) -> bool:
        """Whether answers are heard, or only read."""
        return "audio" in self._shown["output_modalities"]

    @property
    def turn_detection(self) -> Fields | None:
        """None: the client says itself when somebody has spoken."""
        return self._shown["audio"]["input"]["turn_detection"]

    def _settle(self, given: Fields) -> None:
        merged = merge(self._shown, given)
        merged |= {"type": "realtime", "object": "realtime.session", "model": self._shown["model"]}
        if merged["output_modalities"] not in (["audio"], ["text"]):
            merged["output_modalities"] = ["audio"]
        for side in ("input", "output"):
            asked = merged["audio"][side].get("format")
            kind = asked.get("type") if isinstance(asked, dict) else None
            if kind not in RATES:
                kind = "audio/pcm"
            # the only rate that there is: clients take whatever else they are shown at its word
            merged["audio"][side]["format"] = {"type": kind, "rate": 24_000} if kind == "audio/pcm" else {"type": kind}
        turns = merged["audio"]["input"].get("turn_detection")
        if turns is not None:
            known = isinstance(turns, dict) and turns.get("type") in ("server_vad", "semantic_vad")
            common = {"create_response": True, "interrupt_response": True}
            merged["audio"]["input"]["turn_detection"] = {**common, **turns} if known else DECIDES_ITSELF
        self._shown = merged


def merge(old: Fields, new: Fields) -> Fields:
    """Deep: an object changes the fields that it names, except where a `type` says that it is another thing."""
    merged = dict(old)
    for name, value in new.items():
        before = old.get(name)
        if isinstance(before, dict) and isinstance(value, dict) and before.get("type") == value.get("type"):
            merged[name] = merge(before, value)
        elif not isinstance(before, dict) or isinstance(value, dict) or name == "turn_detection":
            merged[name] = value
    return merged
