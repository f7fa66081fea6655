"""Audio of the OpenAI dialect against libsndfile's G.711 and against resampling all at once."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import soundfile
import soxr

from serve_apps.limits import WireError
from serve_apps.openai_audio import DECODE, ENCODE, Ears, Voice, spoken

SUBTYPES = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}


@pytest.mark.parametrize("kind", sorted(SUBTYPES))
def test_g711_is_libsndfile_s(kind: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    layout = {"samplerate": 8000, "channels": 1, "format": "RAW", "subtype": SUBTYPES[kind]}
    values, _ = soundfile.read(io.BytesIO(codes.tobytes()), dtype="int16", **layout)
    np.testing.assert_array_equal(DECODE[kind], values)
    every = np.arange(-32768, 32768, dtype=np.int32)
    error = np.abs(DECODE[kind][ENCODE[kind][every.astype(np.int16).view(np.uint16)]] - every)
    spacing = np.diff(np.sort(values.astype(np.int32))).max()
    assert error.max() <= spacing
    np.testing.assert_array_equal(values[ENCODE[kind][values.view(np.uint16)]], values)


@pytest.mark.parametrize("kind", ["audio/pcm", *sorted(SUBTYPES)])
def test_what_is_spoken_is_heard_again(kind: str) -> None:
    tone_S = (0.3 * np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000)).astype(np.float32)
    raw = base64.b64decode(spoken(kind, tone_S))
    ears = Ears(kind)
    pieces = [raw[i : i + 333] for i in range(0, len(raw), 333)]  # which end within samples
    heard_S = np.concatenate([ears.hear(base64.b64encode(p).decode()) for p in pieces])
    assert heard_S.dtype == np.float32
    wanted_S = soxr.resample(tone_S, 24_000, 16_000)[2_000:14_000]
    assert len(heard_S) > 15_000
    np.testing.assert_allclose(heard_S[2_000:14_000], wanted_S, atol=0.03)


def test_the_loudest_is_not_wrapped_around() -> None:
    raw = base64.b64decode(spoken("audio/pcm", np.array([2.0, -2.0, 0.0], np.float32)))
    assert np.frombuffer(raw, "<i2").tolist() == [32767, -32768, 0]


@pytest.mark.parametrize("audio", [None, 3, "not base64!", "AAA"])
def test_what_is_no_audio_is_refused(audio: object) -> None:
    with pytest.raises(WireError) as caught:
        Ears("audio/pcm").hear(audio)
    assert caught.value.code == "invalid_audio"


def test_voice_is_timed_in_quiet_and_in_noise() -> None:
    rng = np.random.default_rng(0)
    for noise in (0.0, 0.001):
        pcm_S = noise * rng.standard_normal(6 * 16_000)
        pcm_S[2 * 16_000 : 3 * 16_000] += 0.2 * np.sin(np.arange(16_000) / 10)
        voice = Voice()
        changes = [at for piece in np.array_split(pcm_S.astype(np.float32), 97) for at in voice.hear(piece)]
        assert changes == pytest.approx([2000, 3000], abs=40)
