"""Full-Duplex-Bench v1.0 without speech synthesis and recognition: a model's words on the input's clock.

The benchmark records `output.wav` and lets a recogniser say which word came when.  Here the words themselves are
known: what unit u decides to say is spoken in the second that follows it, its words evenly over that second.  Voice
activity is the words' own time, joined over gaps below `GAP_SECONDS`.  Takeovers are those of the published rules;
latencies are exact to the second that a unit is.  Figures made this way say so, and are not the benchmark's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from a2t.audio.files import stream_audio
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import Engine
from a2t.eval.streaming import RATE, System

FOLDERS = {
    "candor_pause_handling": "pause_handling",
    "synthetic_pause_handling": "pause_handling",
    "candor_turn_taking": "smooth_turn_taking",
    "icc_backchannel": "backchannel",
    "synthetic_user_interruption": "user_interruption",
}
"""The published folders and the task that each is scored as."""
GAP_SECONDS = 0.3


def stream_sample(
    engine: Engine,
    system: System,
    audio: Path,
    duplex: DuplexConfig | None = None,
    on_unit: Callable[[], None] = lambda: None,
) -> list[str]:
    """What each unit says."""
    config = system.conversation(None, engine.model)
    if duplex is not None:
        config = replace(config, duplex=replace(duplex, side_channel=system.side_channel))
    conversation = engine.open(config)
    said: list[str] = []
    try:
        for pcm_S in stream_audio(audio, RATE):
            engine.push(conversation, np.pad(pcm_S, (0, RATE - len(pcm_S))))
            for _, result, _ in engine.run():
                said.append(result.response_text)
                on_unit()
    finally:
        engine.close(conversation)
    return said


def output_of(said: Sequence[str], since: float = 0.0) -> dict[str, Any]:
    """`output.json`; words before `since` are left out (of an interruption only what follows it counts)."""
    chunks: list[dict[str, Any]] = []
    for u, text in enumerate(said):
        words = text.split()
        for n, word in enumerate(words):
            start, end = u + 1 + n / len(words), u + 1 + (n + 1) / len(words)
            if start >= since:
                chunks.append({"text": word, "timestamp": [round(start, 3), round(end, 3)]})
    return {"text": " ".join(c["text"] for c in chunks), "chunks": chunks}


def segments_of(output: dict[str, Any], seconds: float) -> dict[str, Any]:
    """`segments.json`: when the model speaks, within an output as long as the input."""
    segments: list[dict[str, float]] = []
    for start, end in (c["timestamp"] for c in output["chunks"]):
        if start >= seconds:
            break
        if segments and start - segments[-1]["end"] < GAP_SECONDS:
            segments[-1]["end"] = min(end, seconds)
        else:
            segments.append({"start": start, "end": min(end, seconds)})
    return {"output_seconds": seconds, "segments": segments}
