"""Audio files of any sample rate and channel count, read as what the models hear: 16 kHz mono float32.

A file is named by its path or by a URI that fsspec knows (s3://...), which is read where it lies.

Reading is streamed in blocks, so a file of many hours costs no more memory than one of a second.  Decoding is
libsndfile's (wav, flac and what else it knows), rate conversion is soxr's; the edges of blocks leave no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import soundfile
import soxr

SAMPLE_RATE = 16_000
LOUDEST = 16.0
"""Peak above which floating-point samples are taken for wrongly scaled ones (24 dB over full scale)."""

_READ_VALUES = 2**20  # samples times channels decoded at once: 4 MB


@dataclass(frozen=True)
class AudioInfo:
    """What a file's header says. `frames` can be wrong in damaged or streamed files: reading goes by what is there."""

    path: str | Path
    sample_rate: int
    channels: int
    frames: int
    encoding: str

    @property
    def seconds(self) -> float:
        return self.frames / self.sample_rate


class Mono16k:
    """Turns blocks of one stream [frames, channels] into 16 kHz mono; the sum of the blocks is the same however cut.

    `name` stands in messages. Raises ValueError for samples that are NaN, infinite or scaled as integers.
    """

    def __init__(self, sample_rate: int, name: str = "audio") -> None:
        if sample_rate <= 0:
            raise ValueError(f"{name}: a sample rate of {sample_rate} Hz is not one")
        self._rate, self._name = sample_rate, name
        self._resampler = soxr.ResampleStream(sample_rate, SAMPLE_RATE, 1) if sample_rate != SAMPLE_RATE else None
        self._frames_in = self._samples_out = 0
        self._last = np.zeros(1, np.float32)

    def push(self, block_FC: np.ndarray) -> np.ndarray:
        """Float32 samples that are complete so far [samples]; resampling holds some back until more follow."""
        pcm_F = block_FC if block_FC.ndim == 1 else block_FC.mean(axis=1, dtype=np.float64).astype(np.float32)
        if not len(pcm_F):
            return pcm_F
        self._check(block_FC)
        self._frames_in += len(pcm_F)
        self._last = pcm_F[-1:]
        out_S = self._resampler.resample_chunk(pcm_F) if self._resampler else pcm_F
        self._samples_out += len(out_S)
        return out_S

    def finish(self) -> np.ndarray:
        """What was held back. At least one sample comes out of a stream that had any."""
        out_S = np.zeros(0, np.float32)
        if self._resampler:
            out_S = self._resampler.resample_chunk(out_S, last=True)
        return self._last if self._frames_in and not self._samples_out + len(out_S) else out_S

    def _check(self, block_FC: np.ndarray) -> None:
        finite = np.isfinite(block_FC)
        if not finite.all():
            seconds = (self._frames_in + int(np.argwhere(~finite)[0][0])) / self._rate
            raise ValueError(
                f"{self._name}: the sample at {seconds:.3f} s is {block_FC[~finite][0]}, not a number; "
                "write the file anew without NaN and infinite samples"
            )
        peak = float(np.abs(block_FC).max())
        if peak > LOUDEST:
            raise ValueError(
                f"{self._name}: samples reach {peak:.6g} where floating-point audio lies between -1 and 1; "
                "if they are 16-bit values, divide them by 32768"
            )


def audio_info(path: str | Path) -> AudioInfo:
    """Raises ValueError for a path that is missing, not a file, empty, or not an audio file."""
    with _open(path) as file:
        return AudioInfo(path, file.samplerate, file.channels, file.frames, f"{file.format} {file.subtype}")


def stream_audio(path: str | Path, block: int = SAMPLE_RATE) -> Iterator[np.ndarray]:
    """The file as blocks of `block` samples (the last may be shorter), 16 kHz mono float32.

    A file that cannot be read raises ValueError at once; one that holds no sample, breaks off (a damaged flac) or has
    NaN, infinite or wrongly scaled samples raises it where that shows.
    """
    if block < 1:
        raise ValueError(f"a block of {block} samples: it takes at least 1")
    info = audio_info(path)
    return _blocks(info, block)


def read_audio(path: str | Path) -> np.ndarray:
    """The whole file, 16 kHz mono float32 [samples]. Errors as `stream_audio`."""
    return np.concatenate(list(stream_audio(path)))


def write_wav(path: str | Path, pcm_S: np.ndarray, sample_rate: int = SAMPLE_RATE) -> None:
    """Mono 16-bit wav of floating-point samples; beyond -1..1 they are clipped.

    What was read from a 16-bit file at its own rate is written back bit for bit. Raises ValueError for anything but a
    vector of finite floating-point samples.
    """
    pcm_S = np.asarray(pcm_S)
    if pcm_S.ndim != 1 or pcm_S.dtype.kind != "f" or not np.isfinite(pcm_S).all():
        raise ValueError(
            f"{path}: a wav is written from a vector of finite floating-point samples, "
            f"not from {pcm_S.dtype} {list(pcm_S.shape)}" + (" with NaN or infinity" if pcm_S.dtype.kind == "f" else "")
        )
    # libsndfile would scale by 32767 here and by 32768 when reading.
    integers = np.clip(np.rint(pcm_S.astype(np.float64) * 32768), -32768, 32767).astype(np.int16)
    soundfile.write(path, integers, sample_rate, subtype="PCM_16", format="WAV")


def _blocks(info: AudioInfo, block: int) -> Iterator[np.ndarray]:
    convert = Mono16k(info.sample_rate, str(info.path))
    frames = max(1, min(info.sample_rate, _READ_VALUES // info.channels))
    held: list[np.ndarray] = []
    done = False
    total = 0
    with _open(info.path) as file:
        while not done:
            try:
                read_FC = file.read(frames, dtype="float32", always_2d=True)
            except soundfile.LibsndfileError as error:
                raise ValueError(
                    f"{info.path}: damaged or cut off after about {file.tell() / info.sample_rate:.1f} s "
                    f"of {info.seconds:.1f} s ({error.error_string.rstrip('.')})"
                ) from error
            total += len(read_FC)
            done = not len(read_FC)
            held.append(convert.finish() if done else convert.push(read_FC))
            if done or sum(map(len, held)) >= block:
                ready_S = np.concatenate(held)
                whole = len(ready_S) - len(ready_S) % block
                for start in range(0, whole, block):
                    yield ready_S[start : start + block]
                held = [ready_S[whole:]]
    if not total:
        raise ValueError(f"{info.path}: holds no audio, only a header ({info.encoding})")
    if len(held[0]):
        yield held[0]


@contextmanager
def _open(path: str | Path) -> Iterator[soundfile.SoundFile]:
    if "://" in str(path):
        try:
            opened = fsspec.open(str(path), "rb").open()
        except (OSError, ImportError, ValueError) as error:
            raise ValueError(f"{path}: cannot be opened ({type(error).__name__}: {error})") from error
        with opened as source, _decoding(source, path) as file:
            yield file
        return
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: there is no such file")
    if not path.is_file():
        raise ValueError(f"{path}: is {'a folder' if path.is_dir() else 'a device'}, not an audio file")
    if not path.stat().st_size:
        raise ValueError(f"{path}: is empty (0 bytes)")
    if path.suffix.lower() == ".raw":
        raise ValueError(f"{path}: bare samples have no header that says their rate and format; save them as wav")
    with _decoding(path, path) as file:
        yield file


def _decoding(source: Any, name: str | Path) -> soundfile.SoundFile:
    try:
        return soundfile.SoundFile(source)
    except (soundfile.LibsndfileError, OSError) as error:
        reason = error.error_string if isinstance(error, soundfile.LibsndfileError) else str(error)
        raise ValueError(
            f"{name}: not an audio file that can be read, such as wav or flac ({reason.rstrip('.')})"
        ) from error
