"""The speech-token decoder against the recorded official one, and how its tokens reach Token2Wav."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from a2t.eval.parity import check_folder
from a2t.models.minicpmo_speech import (
    MiniCPMOSpeech,
    SpeechSettings,
    SpeechTokenStream,
    load_speech_tokens,
    load_token2wav,
)

GOLDEN = Path(os.environ.get("A2T_GOLDEN", "../shared/golden")) / "minicpmo-speech-decoder"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden files (A2T_GOLDEN)")


def test_parity_with_the_official_code() -> None:
    report = check_folder(GOLDEN)
    assert report.ok, "\n".join(report.lines())
    assert report.quantities["audio tokens"].compared == 6


def test_sampling_follows_the_seed_and_stays_among_the_likeliest() -> None:
    decoder, tensors = load_speech_tokens(GOLDEN), load_file(GOLDEN / "expected.safetensors")
    ids, hidden = tensors["token_ids.1"].tolist(), tensors["hidden.1"]

    def run(**settings: Any) -> list[int]:
        return SpeechTokenStream(decoder, SpeechSettings(**settings)).chunk(ids, hidden, True)[0]

    assert run(seed=1) == run(seed=1) != run(seed=2)
    tokens, logits = SpeechTokenStream(decoder, SpeechSettings(seed=1)).chunk(ids, hidden, True)
    for token, logits_V in zip(tokens[:1], logits, strict=False):
        assert token in logits_V.topk(25).indices


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    stream = SpeechTokenStream(load_speech_tokens(GOLDEN))
    with pytest.raises(ValueError, match="2 tokens came with 0 hidden states"):
        stream.chunk([1, 2], None, False)
    while stream.position + 27 <= 512:
        stream.chunk([], None, False)
    with pytest.raises(ValueError, match="of the speech decoder's 512"):
        stream.chunk([], None, False)
    stream.reset()
    assert len(stream.chunk([], None, False)[0]) <= 25
    shutil.copyfile(GOLDEN / "model.safetensors", tmp_path / "model.safetensors")
    config = json.loads((GOLDEN / "config.json").read_text())
    config["tts_config"]["attention_type"] = "sliding_recompute"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="attention_type is 'sliding_recompute'"):
        load_speech_tokens(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no tts_config"):
        load_speech_tokens(tmp_path)


def test_without_its_package_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stepaudio2", None)  # what an absent package looks like to `import`
    with pytest.raises(ValueError, match="pip install .a2t.voice.."):
        load_token2wav("anywhere")


class Recorder:
    """Stands where Token2Wav stands and holds it to its contract: one stream's state at a time, 28 tokens a call until
    the last; a token becomes 960 samples of its own value, so that every sample says where it came from.

    Like the package (1.0.0 to 1.0.6 read for it) it returns a stream's first state without keeping it, and what it
    leaves in `stream_cache` is a view of a buffer that every call writes into.
    """

    stream_cache: Any
    hift_cache_dict: Any

    def __init__(self) -> None:
        self.buffer = torch.zeros(64)

    def set_stream_cache(self, prompt_wav: str) -> tuple[Any, Any]:
        return {"last": self.buffer[:0]}, {"first": torch.ones(1)}

    def stream(self, tokens: list[int], prompt_wav: str | None, last_chunk: bool) -> bytes:
        seen = self.stream_cache["last"].tolist()
        assert self.hift_cache_dict["first"] == (not seen), "the vocoder begins anew with each turn"
        assert not seen or tokens[:3] == seen[-3:], "the lookahead of one call begins the next"
        assert last_chunk or len(tokens) == 28
        self.buffer[: len(tokens)] = torch.tensor([float(t) for t in tokens])
        self.stream_cache = {"last": self.buffer[: len(tokens)]}
        self.hift_cache_dict["first"].zero_()
        spoken = tokens if last_chunk else tokens[:-3]
        return np.repeat(np.array(spoken, "<i2"), 960).tobytes()


def test_alternating_conversations_speak_every_token_once_and_in_order() -> None:
    decoder, tensors = load_speech_tokens(GOLDEN), load_file(GOLDEN / "expected.safetensors")
    voice = MiniCPMOSpeech(decoder, Recorder(), "prompt.wav", SpeechSettings(temperature=1e-4))
    streams, twins = [voice.open(), voice.open()], [SpeechTokenStream(decoder, voice.settings) for _ in range(2)]
    heard: list[list[int]] = [[], []]
    wanted: list[list[int]] = [[], []]
    for turn in range(2):
        for n in range(2):
            wanted[n] += [4218] * 3
        for chunk, end in ((0, False), (1, False), (2, True)):
            ids, hidden = tensors[f"token_ids.{chunk}"].tolist(), tensors[f"hidden.{chunk}"]
            for n in (0, 1) if turn else (1, 0):
                wanted[n] += twins[n].chunk(ids[n:], hidden[n:], end)[0]
                pcm = streams[n].say(ids[n:], hidden[n:], "", end)
                assert pcm.dtype == np.float32 and len(pcm) % 960 == 0
                assert end or len(pcm) == 24_000  # a second of speech for a second of conversation
                heard[n] += [round(float(x) * 32768) for x in pcm[::960]]
    assert heard == wanted
    streams[0].say([5], torch.zeros(1, 64), "", False)
    streams[0].stop()
    assert streams[0].tokens.position == 0
    assert [round(float(x) * 32768) for x in streams[0].say([], None, "", True)[:2880:960]] == [4218] * 3
