"""Choosing native tokens: the filters against transformers', the draws against their distribution, the rules."""

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from a2t.duplex.decoding import DuplexConfig, NativeDecoder, candidates
from a2t.duplex.protocol import SpecialTokens
from tests.duplex.stub import WordTokenizer

TOKENIZER = WordTokenizer()
T = SpecialTokens.from_lookup(TOKENIZER.token_id)
V = len(TOKENIZER.vocabulary)
CUP, DOOR = TOKENIZER.ids["cup"], TOKENIZER.ids["door"]


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (20, 0.8), (3, 0.3), (500, 0.99), (20, 1e-6)]
)
def test_top_k_top_p_equals_transformers(top_k, top_p):
    for seed in range(20):
        logits_1V = 3 * torch.randn((1, V), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        expected = logits_1V
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        ids_N, probability_N = candidates(logits_1V[0], top_k, top_p)
        found_V = torch.zeros(V, dtype=torch.float64).index_put((ids_N,), probability_N)
        torch.testing.assert_close(found_V, expected[0].softmax(-1), rtol=0, atol=1e-15)
        assert (probability_N.diff() <= 0).all() and len(set(ids_N.tolist())) == len(ids_N)


def logits(**likely: float) -> torch.Tensor:
    logits_V = torch.full((V,), -20.0)
    for name, value in likely.items():
        logits_V[getattr(T, name, None) or TOKENIZER.ids[name]] = value
    return logits_V


def test_greedy_takes_chunk_eos_first_then_forbids_it():
    decoder = NativeDecoder(T, DuplexConfig(repetition_penalty=2.0))
    assert decoder.choose(logits(chunk_eos=5, cup=4)) == T.chunk_eos
    assert decoder.choose(logits(cup=4.0, chunk_eos=3.5, door=3.0)) == CUP
    # `cup` was just said, so its logit is halved; <|chunk_eos|> is not what the model chose and stays forbidden
    assert decoder.choose(logits(cup=4.0, chunk_eos=3.5, door=3.0)) == DOOR
    assert list(decoder.recent) == [CUP, DOOR], "<|chunk_eos|> taken at once is not remembered"


def test_side_channel_and_padding_are_never_native():
    decoder = NativeDecoder(T, DuplexConfig())
    assert decoder.choose(logits(asr_start=9, asr_end=8, tts_pad=7, cup=1)) == CUP


def test_repetition_penalty_divides_whatever_the_sign_within_its_window():
    decoder = NativeDecoder(T, DuplexConfig(repetition_penalty=2.0, repetition_window=2))
    decoder.recent.append(CUP)
    assert decoder.choose(logits(cup=-3.0, door=-2.0)) == CUP  # -3 becomes -1.5
    for token in (DOOR, DOOR):
        decoder.recent.append(token)
    assert decoder.choose(logits(cup=3.0, door=3.5)) == CUP  # `cup` has left the window


@pytest.mark.parametrize(("turn_eos", "other"), [(2.0, 1.9), (-1.0, -1.05)])
def test_length_penalty_makes_the_turn_longer(turn_eos, other):
    row = logits(turn_eos=turn_eos, cup=other)
    assert NativeDecoder(T, DuplexConfig()).choose(row) == T.turn_eos
    assert NativeDecoder(T, DuplexConfig(length_penalty=1.1)).choose(row) == CUP


def test_listen_prob_scale_acts_on_the_logit():
    row = logits(listen=2.0, cup=1.5)
    assert NativeDecoder(T, DuplexConfig()).choose(row) == T.listen
    assert NativeDecoder(T, DuplexConfig(listen_prob_scale=0.5)).choose(row) == CUP


def test_sampling_draws_twice():
    """<|chunk_eos|> comes with its raw probability; the others share the rest by the filtered distribution."""
    config = DuplexConfig(greedy=False, temperature=0.7, top_k=4, top_p=0.9, seed=5)
    row = torch.full((V,), -torch.inf)
    row[[T.chunk_eos, CUP, DOOR, T.turn_eos, 30, 31]] = torch.tensor([1.0, 1.5, 1.0, 0.5, 0.2, -3.0])
    decoder, n = NativeDecoder(T, config), 4000
    drawn = np.bincount([decoder.choose(row) for _ in range(n)], minlength=V) / n
    raw = row.double().softmax(-1)
    rest = row.clone()
    rest[T.chunk_eos] = -torch.inf
    rest = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(4)(None, rest[None] / 0.7))[0].double().softmax(-1)
    expected = ((1 - raw[T.chunk_eos]) * rest).numpy()
    expected[T.chunk_eos] = raw[T.chunk_eos]
    error = np.abs(drawn - expected)
    assert (error < 4 * np.sqrt(expected * (1 - expected) / n) + 1e-12).all()


def test_draws_repeat_with_the_seed_and_go_on_from_a_saved_state():
    row = torch.randn(V)
    config = DuplexConfig(greedy=False, seed=11)
    a, b = NativeDecoder(T, config), NativeDecoder(T, config)
    first = [a.choose(row) for _ in range(30)]
    assert [b.choose(row) for _ in range(15)] == first[:15]
    c = NativeDecoder(T, config)
    c.load_state_dict(b.state_dict())
    assert [c.choose(row) for _ in range(15)] == first[15:]
    assert len(set(first)) > 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"temperature": 1e-38},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_transcript_tokens": 0},
        {"repetition_penalty": -1.0},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        DuplexConfig(**wrong)
