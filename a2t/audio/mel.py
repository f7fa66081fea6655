"""Whisper's log-mel spectrogram of a stream, a unit at a time, at a cost that does not grow.

MiniCPM-o computes the spectrogram of its whole buffered stream again for every unit and keeps the frames that no later
sample can change.  The frames of one unit depend on 24,000 samples at most, and on the rest of the buffer through one
number only, the loudest frame: so the same values come from the new samples and a short memory of frame maxima.

Frame t of a buffer is centred on its sample 160 t and sees 200 samples on either side; past the buffer's edges the
samples are mirrored, as in `torch.stft(center=True)`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

RATE = 16_000
HOP = 160
WINDOW = 400
HALF = WINDOW // 2
REDUNDANCY = 2  # frames before and after a unit's own, for the encoder's convolutions
UNIT_SAMPLES = RATE
UNIT_FRAMES = UNIT_SAMPLES // HOP
FIRST_PADDING = 560  # the first chunk is 1,035 ms: 35 ms of zeros, then the first second
FIRST_CONSUMED = 16_480  # 1,030 ms of it: a whole number of hops
DYNAMIC_FROM = 5 * RATE  # from this much buffered audio on the floor follows the loudest frame
SLIDE_AT = 30 * RATE
SLIDE_BY = 10 * RATE
TAIL = WINDOW - HOP + (FIRST_CONSUMED - HALF) % HOP  # samples of the buffer that frames to come will see
EDGE = HOP + HALF  # samples that the two frames at a new left edge see
FLOOR_LOG10 = -10.0
DYNAMIC_RANGE = 8.0


@cache
def _filters(mels: int) -> Tensor:
    bank = mel_filter_bank(1 + WINDOW // 2, mels, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(bank).float().T.contiguous()  # [mels, 201]


@cache
def _window() -> Tensor:
    return torch.hann_window(WINDOW)


def log_mel(samples_S: Tensor, mels: int = 80) -> Tensor:
    """log10 mel energies [mels, frames] of samples that hold whole windows: (S - 400) / 160 + 1 frames, uncentred."""
    spectrum = torch.stft(samples_S, WINDOW, HOP, window=_window(), center=False, return_complex=True)
    return (_filters(mels) @ (spectrum.abs() ** 2)).clamp(min=1e-10).log10()


def normalise(log_MF: Tensor, loudest: float | None) -> Tensor:
    """Whisper's scale: (max(log, floor) + 4) / 4.  `loudest`: the buffer's largest value, None for the fixed floor."""
    floor = FLOOR_LOG10 if loudest is None else loudest - DYNAMIC_RANGE
    return (log_MF.clamp(min=floor) + 4.0) / 4.0


class StreamingMel:
    """One conversation's log-mel spectrogram.

    Source: MiniCPM-o 4.5's exact streaming processor (chunk 1,000 ms, first chunk 1,035 ms, redundancy 20 ms, slide of
    10 s at 30 s).  The result does not depend on how the stream is cut into pushes.
    """

    def __init__(self, mels: int = 80) -> None:
        self.mels = mels
        self.units = 0  # encoded so far
        self._pending = np.zeros(FIRST_PADDING, np.float32)  # pushed, not yet in the buffer
        self._tail = np.zeros(0, np.float32)  # the buffer's last samples: what frames to come will see of it
        self._frames_MF = torch.zeros(mels, 0)  # the buffer's last stable frames, raw log10
        self._loudest_F = np.zeros(0, np.float32)  # each stable frame's maximum, of the frames still in the buffer
        self._first_frame = 0  # the buffer's first frame, counted from the start of the stream
        self._edges: dict[int, np.ndarray] = {}  # samples at which the buffer will begin after a slide

    def push(self, pcm_S: np.ndarray) -> None:
        """Appends 16 kHz mono samples in [-1, 1], float32, any number.  ValueError: another form, NaN or infinity."""
        samples = np.asarray(pcm_S)
        if samples.ndim != 1:
            raise ValueError(f"audio of shape {samples.shape} was pushed: give one channel, shape [samples]")
        if not np.issubdtype(samples.dtype, np.floating):
            raise ValueError(f"audio of type {samples.dtype} was pushed: give float32 in [-1, 1] (int16 / 32768)")
        if not np.isfinite(samples).all():
            raise ValueError("the audio holds NaN or infinite samples")
        self._pending = np.concatenate([self._pending, samples.astype(np.float32)])

    @property
    def units_ready(self) -> int:
        # The first unit leaves 80 samples behind, which every later one keeps as a lead.
        first = 0 if self.units else FIRST_CONSUMED - UNIT_SAMPLES
        return (len(self._pending) - first) // UNIT_SAMPLES

    def next_unit(self) -> Tensor:
        """The next unit's frames with their redundancy: [mels, 102] for the first unit (none before it), then 104.

        AssertionError unless `units_ready`.
        """
        assert self.units_ready > 0, "no whole unit of audio is buffered"
        take = UNIT_SAMPLES if self.units else FIRST_CONSUMED
        new, self._pending = self._pending[:take], self._pending[take:]
        fresh_MF, edge = self._append(new)
        end = FIRST_CONSUMED + UNIT_SAMPLES * self.units  # samples of the stream that have entered the buffer
        if end - self._first_frame * HOP >= SLIDE_AT:
            self._slide()
        buffered = end - self._first_frame * HOP
        loudest = max(float(self._loudest_F.max()), edge) if buffered >= DYNAMIC_FROM else None
        frames_MF = torch.cat([self._frames_MF, fresh_MF], dim=1)
        self._frames_MF = frames_MF[:, -2 * REDUNDANCY :].clone()
        self.units += 1
        return normalise(frames_MF, loudest)

    def _append(self, new: np.ndarray) -> tuple[Tensor, float]:
        """Takes `new` into the buffer: its stable frames, raw, and the loudest value of the one frame that is not yet
        stable (it mirrors samples at the buffer's end, and counts for the maximum all the same)."""
        first = self.units == 0
        lead = new[1 : HALF + 1][::-1] if first else self._tail
        seen = np.concatenate([lead, new])
        fresh_MF = log_mel(torch.from_numpy(seen), self.mels)
        self._loudest_F = np.concatenate([self._loudest_F, fresh_MF.amax(0).numpy()])
        stable = fresh_MF.shape[1]
        rest = seen[stable * HOP :]
        mirrored = np.concatenate([rest, rest[-2 : -2 - (WINDOW - len(rest)) : -1]])
        edge = float(log_mel(torch.from_numpy(mirrored), self.mels).max())
        if not first:
            self._remember_edge(seen)
        self._tail = rest.copy()
        return fresh_MF, edge

    def _remember_edge(self, seen: np.ndarray) -> None:
        """Keeps the samples at the next place where a slide will cut, when they pass by."""
        end = FIRST_CONSUMED + UNIT_SAMPLES * self.units
        start = end - len(seen)
        cut = -(-start // SLIDE_BY) * SLIDE_BY
        if cut + EDGE <= end:
            self._edges[cut] = seen[cut - start :][:EDGE].copy()

    def _slide(self) -> None:
        """Drops the oldest 10 s.  The two frames at the new edge see mirrored samples from now on."""
        self._first_frame += SLIDE_BY // HOP
        self._loudest_F = self._loudest_F[SLIDE_BY // HOP :].copy()
        samples = self._edges.pop(self._first_frame * HOP)
        seen = np.concatenate([samples[1 : HALF + 1][::-1], samples])
        self._loudest_F[:2] = log_mel(torch.from_numpy(seen), self.mels).amax(0).numpy()[:2]

    @property
    def nbytes(self) -> int:
        """Bytes held between units, samples not yet encoded included."""
        arrays = [self._pending, self._tail, self._loudest_F, *self._edges.values()]
        return sum(a.nbytes for a in arrays) + self._frames_MF.nbytes

    @staticmethod
    def largest_nbytes(mels: int = 80) -> int:
        """The most that `nbytes` comes to between units, however long the stream: 80 samples and the tail, the maxima
        of just under 30 s of frames, the edges of two slides to come and four frames."""
        return 4 * (80 + TAIL + (SLIDE_AT - UNIT_SAMPLES) // HOP + 2 + 2 * EDGE + 2 * REDUNDANCY * mels)

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON values from which `restore` makes an equal state."""
        tensors = {
            "pending": torch.from_numpy(self._pending.copy()),
            "tail": torch.from_numpy(self._tail.copy()),
            "frames": self._frames_MF.clone(),
            "loudest": torch.from_numpy(self._loudest_F.copy()),
        }
        tensors |= {f"edge.{cut}": torch.from_numpy(samples.copy()) for cut, samples in self._edges.items()}
        return tensors, {"mels": self.mels, "units": self.units, "first_frame": self._first_frame}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> StreamingMel:
        state = cls(meta["mels"])
        state.units, state._first_frame = meta["units"], meta["first_frame"]
        state._pending = tensors["pending"].numpy().copy()
        state._tail = tensors["tail"].numpy().copy()
        state._frames_MF = tensors["frames"].clone()
        state._loudest_F = tensors["loudest"].numpy().copy()
        state._edges = {
            int(name.removeprefix("edge.")): samples.numpy().copy()
            for name, samples in tensors.items()
            if name.startswith("edge.")
        }
        return state
