"""The streaming log-mel against the whole-buffer form, written from its definition, and against recorded frames."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import WhisperFeatureExtractor

from a2t.audio.mel import StreamingMel

GOLDEN = Path(os.environ.get("A2T_GOLDEN", "../shared/golden"))
STOCK = WhisperFeatureExtractor(feature_size=80)


def raw_log_mel(samples: np.ndarray) -> torch.Tensor:
    """Whisper's, before its floor and scale."""
    stft = torch.stft(torch.from_numpy(samples), 400, 160, window=torch.hann_window(400), return_complex=True)
    mel = torch.from_numpy(STOCK.mel_filters).float().T @ (stft[..., :-1].abs() ** 2)
    return mel.clamp(min=1e-10).log10()


def whole_buffer(pcm: np.ndarray, units: int) -> list[torch.Tensor]:
    """The official rule: all buffered audio computed again for every unit."""
    stream = np.concatenate([np.zeros(560, np.float32), pcm])
    dropped, out = 0, []
    for unit in range(units):
        end = 16_480 + 16_000 * unit
        if end - dropped >= 480_000:
            dropped += 160_000
        buffer = stream[dropped:end]
        if len(buffer) < 80_000:
            mel = (raw_log_mel(buffer).clamp(min=-10) + 4) / 4
        else:
            mel = torch.from_numpy(STOCK._torch_extract_fbank_features(buffer))
        first = 100 * unit - dropped // 160
        out.append(mel[:, max(0, first - 2) : first + 102])
    return out


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    """Noise whose level jumps by up to 80 dB every second, silence among it: the loudest frame comes and goes."""
    rng = np.random.default_rng(seed)
    level = 10.0 ** rng.uniform(-4, 0, int(seconds) + 1)
    level[rng.random(len(level)) < 0.15] = 0
    samples = rng.standard_normal(int(seconds * 16_000)) * np.repeat(level, 16_000)[: int(seconds * 16_000)] * 0.2
    return samples.astype(np.float32)


def test_equal_to_the_whole_buffer_form_through_switch_and_slides() -> None:
    pcm, mel = noise(85), StreamingMel()
    found: list[torch.Tensor] = []
    rng = np.random.default_rng(1)
    at = 0
    while at < len(pcm):  # pushes of any size
        size = int(rng.integers(1, 30_000))
        mel.push(pcm[at : at + size])
        at += size
        while mel.units_ready:
            found.append(mel.next_unit())
            if len(found) % 7 == 3:
                mel = StreamingMel.restore(*mel.export())
    expected = whole_buffer(pcm, 85)
    assert len(found) == len(expected) == 85
    for unit, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert f.shape == e.shape
        torch.testing.assert_close(f, e, rtol=0, atol=1e-6, msg=f"unit {unit}")


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden files (A2T_GOLDEN)")
@pytest.mark.parametrize("name", ["minicpmo-duplex", "minicpmo-duplex-window", "minicpmo-duplex-context"])
def test_recorded_frames(name: str) -> None:
    tensors = load_file(GOLDEN / name / "expected.safetensors")
    units = len(json.loads((GOLDEN / name / "expected.json").read_text())["units"])
    pcm, rate = soundfile.read(GOLDEN / name / "input.wav", dtype="float32")
    assert rate == 16_000
    mel, compared = StreamingMel(), 0
    for unit in range(units):
        mel.push(pcm[16_000 * unit : 16_000 * (unit + 1)])
        frames = mel.next_unit()
        if f"mel.{unit}" in tensors:
            torch.testing.assert_close(frames, tensors[f"mel.{unit}"][0], rtol=0, atol=1e-4)
            compared += 1
    assert compared >= 8


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 48_000), max_size=12), seed=st.integers(0, 5))
def test_the_cut_of_the_stream_does_not_matter(cuts: list[int], seed: int) -> None:
    pcm = noise(3, seed)
    whole, cut = StreamingMel(), StreamingMel()
    whole.push(pcm)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(pcm)], strict=True):
        cut.push(pcm[start:end])
    assert whole.units_ready == cut.units_ready == 3
    for _ in range(3):
        assert torch.equal(whole.next_unit(), cut.next_unit())
    assert whole.units_ready == cut.units_ready == 0


def test_a_unit_costs_the_same_however_long_the_stream() -> None:
    """Time and bytes do not grow: twelve minutes, 70 slides, the first two minutes against the last two.  (An hour
    gives the same; set A2T_HOUR=1 to see it.)"""
    second = noise(1, 3)
    mel, spent, held = StreamingMel(), [], []
    for _ in range(3600 if os.environ.get("A2T_HOUR") else 720):
        mel.push(second)
        start = time.process_time()
        mel.next_unit()
        spent.append(time.process_time() - start)
        held.append(mel.nbytes)
    early, late = np.median(spent[30:150]), np.median(spent[-120:])
    assert late < 2 * early + 5e-4  # a busy machine is uneven; the whole-buffer form grows thirtyfold
    assert max(held) == StreamingMel.largest_nbytes()
    assert max(held[-120:]) == max(held[:120])
    print(f"median ms a unit: {1e3 * early:.3f} early, {1e3 * late:.3f} late; {max(held)} bytes at most")


@pytest.mark.parametrize(
    ("audio", "said"),
    [
        (np.zeros((2, 100), np.float32), "one channel"),
        (np.zeros(100, np.int16), "int16 / 32768"),
        (np.array([0.0, np.nan], np.float32), "NaN"),
        (np.array([np.inf], np.float32), "infinite"),
    ],
)
def test_what_is_no_audio_is_refused(audio: np.ndarray, said: str) -> None:
    mel = StreamingMel()
    with pytest.raises(ValueError, match=said):
        mel.push(audio)
    mel.push(np.zeros(16_000, np.float32))
    assert mel.units_ready == 1
