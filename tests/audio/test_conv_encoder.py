import numpy as np
import pytest
import torch

from a2t.audio.conv_encoder import RATE, Adaptor, ConvEncoder, EncoderConfig, LogMel, StreamingConvEncoder

CONFIG = EncoderConfig(hidden=32, blocks=2, layers=2, heads=2, feed_forward=64)


@pytest.fixture
def encoder() -> StreamingConvEncoder:
    torch.manual_seed(0)
    core, adaptor = ConvEncoder(CONFIG, vocab=20).double(), Adaptor(32, 16, 20).double()
    torch.nn.init.normal_(adaptor.project.weight)
    torch.nn.init.normal_(adaptor.word_embedding)
    out = StreamingConvEncoder(core, adaptor, torch.float64)
    out.mel.double()
    return out


def whole(encoder: StreamingConvEncoder, pcm_S: np.ndarray) -> torch.Tensor:
    padded = torch.from_numpy(np.concatenate([np.zeros(240), pcm_S]))[None]
    with torch.inference_mode():
        h, _ = encoder.encoder(encoder.mel(padded))
        return encoder.adaptor(h, encoder.encoder.word_head(h))[0]


def test_streaming_equals_the_whole(encoder: StreamingConvEncoder) -> None:
    """Twelve units, well past the cache's 40 frames, in pieces of odd lengths, two conversations of different age."""
    rng = np.random.default_rng(0)
    pcm = rng.standard_normal((2, 12 * RATE)).astype(np.float32) * 0.1
    states = [encoder.new_state(), encoder.new_state()]
    got: list[list[torch.Tensor]] = [[], []]
    states[0].push(pcm[0, : 3 * RATE])
    for _ in range(3):
        got[0].append(encoder.encode(states[:1])[0].double())
    states[0].push(pcm[0, 3 * RATE :])
    for piece in np.array_split(pcm[1], 7):
        states[1].push(piece)
    while any(s.units_ready for s in states):
        ready = [n for n in range(2) if states[n].units_ready]
        for n, e in zip(ready, encoder.encode([states[n] for n in ready]), strict=True):
            got[n].append(e.double())
    for n in range(2):
        # the log-mel runs on float32 samples in both; the rest is float64
        assert torch.allclose(torch.cat(got[n]), whole(encoder, pcm[n].astype(np.float64)), atol=1e-9)


def test_cache_is_bounded(encoder: StreamingConvEncoder) -> None:
    state = encoder.new_state()
    sizes = []
    for _ in range(8):
        state.push(np.zeros(RATE, np.float32))
        encoder.encode([state])
        sizes.append(state.nbytes)
    assert sizes[3] < sizes[4] == sizes[5] == sizes[7] or sizes[3] == sizes[7]
    assert state.caches["k0"].shape[2] == CONFIG.left - 1


def test_export_restores_exactly(encoder: StreamingConvEncoder) -> None:
    rng = np.random.default_rng(1)
    pcm = rng.standard_normal(6 * RATE + 4321).astype(np.float32)
    state = encoder.new_state()
    state.push(pcm)
    for _ in range(5):
        encoder.encode([state])
    copy = encoder.restore_state(*state.export())
    assert torch.equal(encoder.encode([state]), encoder.encode([copy]))
    assert np.array_equal(state.waiting_S, copy.waiting_S) and len(copy.waiting_S) == 4321


def test_log_mel_needs_no_future() -> None:
    mel = LogMel()
    x = torch.randn(1, 240 + 3 * RATE)
    whole_TM = mel(x)[0]
    assert whole_TM.shape == (300, 80)
    assert torch.equal(whole_TM[:100], mel(x[:, : 240 + RATE])[0])
    assert float(mel(torch.zeros(1, 640)).max()) == pytest.approx(-1.0)
