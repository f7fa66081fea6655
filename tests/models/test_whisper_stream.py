"""The streaming encoder: one by one equals batched, the cache's reset, exact restoring, memory on paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from a2t.models.whisper_stream import Projection, StreamingWhisper, whisper_config


def encoder(limit: int = 220, dtype: torch.dtype = torch.float64) -> StreamingWhisper:
    sizes = {
        "num_mel_bins": 80,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
    }
    torch.manual_seed(0)
    whisper = WhisperEncoder(whisper_config({**sizes, "max_source_positions": limit}, "config")).to(dtype)
    for p in whisper.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return StreamingWhisper(whisper, Projection(32, 24).to(dtype), pool=5)


def speech(seed: int, seconds: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(16_000 * seconds).astype(np.float32) * 0.1


def test_batched_equals_one_by_one_whatever_the_ages() -> None:
    """Conversations that start at different times, through first units and cache resets."""
    model, units, late = encoder(), 7, (0, 2, 3)
    audio = [speech(n, units) for n in range(3)]
    alone = []
    for pcm in audio:
        state = model.new_state()
        state.push(pcm)
        alone.append([model.encode([state])[0] for _ in range(units)])
    states = [model.new_state() for _ in audio]
    for tick in range(units + max(late)):
        here = [n for n in range(3) if 0 <= tick - late[n] < units]
        for n in here:
            states[n].push(audio[n][16_000 * (tick - late[n]) :][:16_000])
        together = model.encode([states[n] for n in here])
        for row, n in enumerate(here):
            torch.testing.assert_close(together[row], alone[n][tick - late[n]], rtol=0, atol=1e-12)


def stock_forward(model: StreamingWhisper, mels: list[torch.Tensor]) -> torch.Tensor:
    """All units at once through the same layers' weights, block-causal: each unit sees the earlier ones and itself."""
    e, frames = model.encoder, []
    for n, mel in enumerate(mels):
        h = F.gelu(e.conv2(F.gelu(e.conv1(mel[None].to(model.dtype)))))[0].T
        frames.append(h[(n > 0) :][:50])
    h = torch.cat(frames) + e.embed_positions.weight[: 50 * len(mels)]
    block = torch.arange(len(h)) // 50
    mask = torch.where(block[:, None] >= block[None], 0.0, float("-inf")).to(h)
    for layer in e.layers:
        x, a = layer.self_attn_layer_norm(h), layer.self_attn
        q, k, v = (p(x).view(len(h), 4, 8).transpose(0, 1) for p in (a.q_proj, a.k_proj, a.v_proj))
        weights = (q @ k.transpose(1, 2) / 8**0.5 + mask).softmax(-1)
        h = h + a.out_proj((weights @ v).transpose(0, 1).reshape(len(h), 32))
        h = h + layer.fc2(F.gelu(layer.fc1(layer.final_layer_norm(h))))
    out = model.projection(e.layer_norm(h))
    return out.view(-1, 5, out.shape[-1]).mean(1)


def test_the_cache_gives_what_one_masked_forward_gives_until_it_is_dropped() -> None:
    model = encoder()  # limit 220: the fifth unit starts anew
    state, twin = model.new_state(), model.new_state()
    pcm = speech(5, 6)
    state.push(pcm)
    twin.push(pcm)
    mels = [twin.mel.next_unit() for _ in range(6)]
    lengths, found = [], []
    with torch.no_grad():
        for _ in range(6):
            found.append(model.encode([state])[0])
            lengths.append(state.length)
        expected = stock_forward(model, mels[:4])
    assert lengths == [50, 100, 150, 200, 50, 100]
    torch.testing.assert_close(torch.cat(found[:4]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 4, 5])
def test_a_restored_state_goes_on_bit_for_bit(cut: int) -> None:
    model = encoder(dtype=torch.float32)
    state, pcm = model.new_state(), speech(6, 8)
    for unit in range(cut):
        state.push(pcm[16_000 * unit : 16_000 * (unit + 1)])
        model.encode([state])
    state.push(pcm[16_000 * cut : 16_000 * cut + 700])
    copy = model.restore_state(*state.export())
    for each in (state, copy):
        each.push(pcm[16_000 * cut + 700 :])
    while state.units_ready:
        assert torch.equal(model.encode([state]), model.encode([copy]))
    with pytest.raises(ValueError, match="the model that wrote it"):
        encoder(dtype=torch.float64).restore_state(*state.export())
