"""What an engine runs: `module:function` names of models, and how one is loaded. No Ray."""

from __future__ import annotations

import importlib
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from a2t.data.espeak import SAMPLE_RATE as ESPEAK_RATE
from a2t.data.espeak import Espeak
from a2t.duplex.conversation import ConversationConfig
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import Engine
from a2t.models.base import DuplexModel
from a2t.models.speech import EspeakSpeech, SpeechDecoder
from serve_apps.engine_actor import EMBEDDED
from serve_apps.engine_actor import HostConfig as HostConfig
from serve_apps.messages import SAMPLE_RATE_IN, SessionOptions


def embedded(adapter: str | None = None) -> DuplexModel:
    """The embedded default with its side channel, or another adapter's (a PEFT folder)."""
    from a2t.models.tiny import ADAPTER, load_tiny

    return load_tiny(adapter=ADAPTER if adapter is None else Path(adapter))


def checkpoint(path: str, adapter: str | None = None, dtype: str | None = None, device: str | None = None) -> Any:
    """A MiniCPM-o checkpoint's folder, or one of the embedded model's form; `dtype`: bf16, fp16 or fp32."""
    from a2t.models.loading import DTYPES
    from a2t.models.loading import load_model as load

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    return load(path, adapter, DTYPES[dtype] if dtype else None, device)


def load_model(spec: str, options: dict[str, Any]) -> DuplexModel:
    """Raises ValueError if `spec` is not `module:function`."""
    module, _, function = spec.partition(":")
    if not function:
        raise ValueError(f"model {spec!r} is not module:function, as {EMBEDDED} is")
    return getattr(importlib.import_module(module), function)(**options)


@cache
def _espeak() -> Espeak:
    """The process's one."""
    return Espeak()


_SPEAKING = threading.Lock()


def _say(text: str) -> np.ndarray:
    with _SPEAKING:  # espeak-ng keeps global state
        return _espeak().say(text).pcm_S


def espeak_speech() -> SpeechDecoder:
    return EspeakSpeech(_say, ESPEAK_RATE)


def spoken(text: str) -> np.ndarray:
    """16 kHz mono float32 of a text in espeak-ng's voice."""
    import soxr

    words = "".join(c for c in text if c.isprintable()).strip()
    if not words:
        return np.zeros(0, np.float32)
    return np.asarray(soxr.resample(_say(words), ESPEAK_RATE, SAMPLE_RATE_IN), np.float32)


def warm_up(engine: Engine, seconds: int = 2) -> None:
    """A short silent conversation, so that the first caller does not pay for what is set up on first use."""
    conversation = engine.open()
    engine.push(conversation, np.zeros(seconds * engine.model.encoder.samples_per_unit, np.float32))
    engine.run()
    engine.close(conversation)


def conversation_config(model: DuplexModel, host: HostConfig, options: SessionOptions) -> ConversationConfig:
    """What a client asks for, on top of the model's own settings. ValueError where it does not fit."""
    duplex = DuplexConfig.of(model)
    if options.temperature is not None:
        duplex = replace(duplex, greedy=options.temperature == 0)
        if options.temperature > 0:
            duplex = replace(duplex, temperature=options.temperature)
    if options.length_penalty is not None:
        duplex = replace(duplex, length_penalty=options.length_penalty)
    if options.max_tokens is not None:
        duplex = replace(duplex, max_new_speak_tokens_per_chunk=min(options.max_tokens, 64))
    config = ConversationConfig(
        duplex=duplex,
        system_prompt=options.system_prompt,
        policy_options={"text_tier": options.text_tier or host.text_tier},
    )
    return config if options.budget is None else replace(config, budget=options.budget)


def settings_in_force(config: ConversationConfig, speech: bool, prefix_tokens: int) -> dict[str, Any]:
    """As the client is told."""
    return {
        "max_kv_tokens": config.budget,
        "policy": config.policy,
        "text_tier": config.policy_options.get("text_tier"),
        "temperature": 0.0 if config.duplex.greedy else config.duplex.temperature,
        "length_penalty": config.duplex.length_penalty,
        "max_tokens": config.duplex.max_new_speak_tokens_per_chunk,
        "tts_enabled": speech,
        "prefix_tokens": prefix_tokens,
    }
