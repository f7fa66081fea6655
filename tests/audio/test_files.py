"""Files of every shape against soundfile's own reading and scipy's resampling; what cannot be read says why."""

from __future__ import annotations

import struct
import tracemalloc
import wave
from pathlib import Path

import fsspec
import numpy as np
import pytest
import scipy.signal
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from a2t.audio.files import SAMPLE_RATE, Mono16k, audio_info, read_audio, stream_audio, write_wav


def tone(rate: int, seconds: float = 1.0, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


@pytest.mark.parametrize(
    ("suffix", "encoding", "error"),
    [
        ("wav", "PCM_16", 5e-5),
        ("wav", "PCM_24", 1e-6),
        ("wav", "PCM_32", 1e-6),
        ("wav", "PCM_U8", 1e-2),
        ("wav", "FLOAT", 1e-7),
        ("wav", "DOUBLE", 1e-7),
        ("wav", "ULAW", 3e-2),
        ("flac", "PCM_16", 5e-5),
        ("flac", "PCM_24", 1e-6),
        ("flac", "PCM_S8", 1e-2),
    ],
)
def test_every_encoding(tmp_path: Path, suffix: str, encoding: str, error: float) -> None:
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, tone(SAMPLE_RATE), SAMPLE_RATE, subtype=encoding)
    pcm = read_audio(path)
    assert pcm.dtype == np.float32
    assert pcm.shape == (SAMPLE_RATE,)
    assert np.abs(pcm - tone(SAMPLE_RATE)).max() <= error


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000, 192_000])
def test_every_rate(tmp_path: Path, rate: int) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(rate, 2.0), rate, subtype="DOUBLE")
    pcm = read_audio(path)
    assert len(pcm) == 2 * SAMPLE_RATE
    middle = slice(SAMPLE_RATE // 2, -SAMPLE_RATE // 2)
    assert np.abs(pcm - tone(SAMPLE_RATE, 2.0))[middle].max() < 1e-3  # the tone itself, no delay
    stock = scipy.signal.resample_poly(tone(rate, 2.0), SAMPLE_RATE, rate)
    assert np.abs(pcm - stock)[middle].max() < 5e-3


@pytest.mark.parametrize("rate", [22_050, 48_000])
def test_what_16_khz_cannot_hold_is_filtered_out(tmp_path: Path, rate: int) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(rate, hertz=10_000), rate)
    assert np.abs(read_audio(path)[2_000:-2_000]).max() < 1e-3  # no alias at 6 kHz


@pytest.mark.parametrize("channels", [2, 6, 100, 1024])
def test_channels_are_averaged(tmp_path: Path, channels: int) -> None:
    path = tmp_path / "a.wav"
    samples = np.random.default_rng(0).uniform(-1, 1, (2_000, channels))
    soundfile.write(path, samples, SAMPLE_RATE, subtype="FLOAT")
    assert np.abs(read_audio(path) - samples.mean(axis=1)).max() < 1e-6


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 192_000])
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_the_shortest_files(tmp_path: Path, rate: int, frames: int) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, np.full(frames, 0.25), rate)
    pcm = read_audio(path)
    assert max(1, int(frames * SAMPLE_RATE / rate)) <= len(pcm) <= -(-frames * SAMPLE_RATE // rate) + 1
    assert np.isfinite(pcm).all()
    assert np.abs(pcm).max() < 1


@settings(max_examples=40)
@given(
    rate=st.sampled_from([8_000, 16_000, 22_050, 44_100]),
    cuts=st.lists(st.integers(0, 6_000), max_size=6),
    channels=st.integers(1, 3),
)
def test_where_the_stream_is_cut_does_not_matter(rate: int, cuts: list[int], channels: int) -> None:
    samples = np.random.default_rng(1).uniform(-1, 1, (6_000, channels)).astype(np.float32)
    whole, pieces = Mono16k(rate), Mono16k(rate)
    expected = np.concatenate([whole.push(samples), whole.finish()])
    parts = [pieces.push(part) for part in np.split(samples, sorted(cuts))]
    assert np.array_equal(np.concatenate([*parts, pieces.finish()]), expected)


@pytest.mark.parametrize("block", [1, 777, 16_000, 1_000_000])
def test_blocks_are_of_the_size_asked_for(tmp_path: Path, block: int) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, np.random.default_rng(2).uniform(-1, 1, (10_000, 2)), 22_050)
    blocks = list(stream_audio(path, block))
    assert {len(b) for b in blocks[:-1]} <= {block}
    assert 0 < len(blocks[-1]) <= block
    assert np.array_equal(np.concatenate(blocks), read_audio(path))


def test_hours_do_not_sit_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.wav"
    with soundfile.SoundFile(path, "w", 8_000, 1, "PCM_U8") as file:
        for _ in range(20):
            file.write(np.zeros(60 * 8_000, np.float32))
    tracemalloc.start()
    seconds = sum(len(block) for block in stream_audio(path)) / SAMPLE_RATE
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds == 1_200
    assert peak < 4e6  # whole, it would be 77 MB


def test_info(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, np.zeros((44_100, 2)), 44_100, subtype="PCM_24")
    info = audio_info(path)
    assert (info.sample_rate, info.channels, info.seconds, info.encoding) == (44_100, 2, 1.0, "FLAC PCM_24")


def test_written_wav_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    every = np.arange(-32768, 32768, dtype=np.float32) / 32768
    write_wav(tmp_path / "a.wav", every)
    assert np.array_equal(read_audio(tmp_path / "a.wav"), every)
    with wave.open(str(tmp_path / "a.wav")) as file:  # the standard library's reader
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        assert np.array_equal(np.frombuffer(file.readframes(65_536), "<i2"), np.arange(-32768, 32768))
    write_wav(tmp_path / "loud.wav", np.array([-3.0, 1.0, 3.0]))
    assert read_audio(tmp_path / "loud.wav").tolist() == [-1, 32767 / 32768, 32767 / 32768]


@pytest.mark.parametrize("bad", [np.zeros((2, 2)), np.zeros(3, np.int16), np.array([0.0, np.nan])])
def test_what_is_no_wav_is_not_written(tmp_path: Path, bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="vector of finite floating-point samples"):
        write_wav(tmp_path / "a.wav", bad)
    assert not (tmp_path / "a.wav").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.wav", b"", "is empty"),
        ("text.wav", b"hello there" * 50, "not an audio file"),
        ("header.wav", b"RIFF\x24\x00\x00\x00WAVE", "not an audio file"),
        ("noise.flac", b"fLaC" + bytes(range(200)), "not an audio file"),
        ("bare.raw", b"\x00" * 100, "no header"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        stream_audio(tmp_path / name)  # at once, not at the first block
    assert name in str(error.value)


def test_missing_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_audio(tmp_path / "nowhere.wav")
    with pytest.raises(ValueError, match="is a folder"):
        read_audio(tmp_path)


def test_a_uri_is_read_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, tone(24_000), 16_000)
    fsspec.filesystem("memory").pipe_file("/a2t-audio/a.flac", path.read_bytes())
    for uri in (f"file://{path}", "memory://a2t-audio/a.flac"):
        assert np.array_equal(read_audio(uri), read_audio(path))
        assert audio_info(uri).seconds == 1.5
    for uri in ("memory://a2t-audio/b.flac", "nowhere://a.flac"):
        with pytest.raises(ValueError, match=f"{uri}: cannot be opened"):
            read_audio(uri)
    fsspec.filesystem("memory").pipe_file("/a2t-audio/c.flac", b"no audio")
    with pytest.raises(ValueError, match=r"c\.flac: not an audio file"):
        read_audio("memory://a2t-audio/c.flac")
    fsspec.filesystem("memory").rm("/a2t-audio", recursive=True)


def test_a_header_without_samples(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(0), 16_000)
    with pytest.raises(ValueError, match="holds no audio"):
        read_audio(tmp_path / "a.wav")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("encoding", ["FLOAT", "DOUBLE"])
def test_numbers_that_are_none(tmp_path: Path, value: float, encoding: str) -> None:
    samples = np.zeros((24_000, 2))
    samples[20_000, 1] = value
    soundfile.write(tmp_path / "a.wav", samples, 8_000, subtype=encoding)
    blocks = stream_audio(tmp_path / "a.wav")
    next(blocks)  # what came before is heard
    with pytest.raises(ValueError, match=rf"2\.500 s is {value}"):
        list(blocks)


def test_samples_scaled_as_integers(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(16_000) * 32768, 16_000, subtype="FLOAT")
    with pytest.raises(ValueError, match="divide them by 32768"):
        read_audio(tmp_path / "a.wav")
    soundfile.write(tmp_path / "b.wav", tone(16_000) * 4, 16_000, subtype="FLOAT")  # merely loud
    assert np.abs(read_audio(tmp_path / "b.wav")).max() == pytest.approx(2.0)


def test_a_flac_that_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, np.random.default_rng(3).uniform(-1, 1, 160_000), 16_000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"damaged or cut off after about \d\.\d s of 10\.0 s"):
        read_audio(path)


def test_a_wav_that_promises_too_much(tmp_path: Path) -> None:
    """A recorder that was killed leaves the length 0xFFFFFFFF in the header: what is there is read."""
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(16_000), 16_000)
    data = bytearray(path.read_bytes())
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", 0xFFFFFFFF)
    data[4:8] = struct.pack("<I", 0xFFFFFFFF)
    path.write_bytes(bytes(data))
    assert len(read_audio(path)) == 16_000


def test_a_block_of_nothing(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(16_000), 16_000)
    with pytest.raises(ValueError, match="at least 1"):
        stream_audio(tmp_path / "a.wav", 0)
    with pytest.raises(ValueError, match="sample rate of 0"):
        Mono16k(0)
