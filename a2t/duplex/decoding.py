"""MiniCPM-o's rules for choosing a native token, greedy and sampled.  Source: its streaming decoder (`decode`).

    1. choose from the model's own distribution; if that is `<|chunk_eos|>`, take it: the model decides when to pause;
    2. otherwise forbid `<|chunk_eos|>` (and `<|tts_pad|>`), apply the penalties and choose again.

The side channel's tokens are never a native choice: they are forbidden from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from a2t.duplex.protocol import SpecialTokens

COLDEST = 0.01
"""The lowest temperature: logits divided by much less are not finite any more."""


class HasRules(Protocol):
    @property
    def decoding(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class DuplexConfig:
    """How one conversation decodes.

    The defaults are the embedded model's: greedy, no penalties.  `DuplexConfig.of(model)` gives a model's own.
    """

    max_new_speak_tokens_per_chunk: int = 20
    """Decoding steps a unit; the last is a forced `<|chunk_eos|>`."""
    chunk_char_limit: int | None = 28
    """A chunk whose text would reach this many characters is closed before the token that would do it."""
    first_token_is_text: bool = True
    """Whether a unit's first token, where it is a text token, belongs to the response's text.  MiniCPM-o takes a unit's
    first token for the decision whatever it is and leaves it out of text and speech (False)."""
    greedy: bool = True
    temperature: float = 0.7
    top_k: int = 20
    top_p: float = 0.8
    repetition_penalty: float = 1.0
    repetition_window: int = 512
    length_penalty: float = 1.0
    """Above 1 makes `<|turn_eos|>` less likely, so turns get longer."""
    listen_prob_scale: float = 1.0
    """Factor on the logit (as in MiniCPM-o, despite its name) of `<|listen|>`."""
    side_channel: bool = True
    max_transcript_tokens: int = 64
    draft: bool = True
    """Whether likely tokens are fed before they are chosen, and taken back where they are not. Changes no output."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("max_new_speak_tokens_per_chunk", 1),
            ("max_transcript_tokens", 1),
            ("repetition_window", 1),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}")
        for name in ("temperature", "repetition_penalty", "length_penalty", "listen_prob_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0; 1.0 leaves it without effect")
        if self.temperature < COLDEST:
            raise ValueError(
                f"temperature={self.temperature} must be at least {COLDEST}; greedy=True takes the likeliest"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1.0 keeps every token")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (keep every token) or more")

    @classmethod
    def of(cls, model: HasRules, **changes: Any) -> DuplexConfig:
        """The model's own settings (`decoding` of a2t.models.base.DuplexModel), then `changes`."""
        return cls(**{**model.decoding, **changes})

    @classmethod
    def minicpmo(cls, **changes: Any) -> DuplexConfig:
        """MiniCPM-o 4.5's own settings."""
        from a2t.models.minicpmo import DECODING  # brings transformers, which not everybody needs

        return cls(**{**DECODING, **changes})


class NativeDecoder:
    """Chooses native tokens; remembers the recent ones for the repetition penalty, and the random state."""

    def __init__(self, tokens: SpecialTokens, config: DuplexConfig):
        self.tokens, self.config = tokens, config
        self.recent: deque[int] = deque(maxlen=config.repetition_window)
        self.rng = np.random.Generator(np.random.PCG64(config.seed))
        self._never = torch.tensor([i for i in (tokens.asr_start, tokens.asr_end) if i is not None], dtype=torch.long)
        self._not_now = torch.tensor([tokens.chunk_eos, tokens.tts_pad])

    def choose(self, logits_V: Tensor) -> int:
        """The next native token's id from the logits [V] of one position, on CPU (left unchanged)."""
        c, t = self.config, self.tokens
        logits_V = logits_V.index_fill(0, self._never, -torch.inf)
        if c.greedy:
            pauses = int(logits_V.argmax()) == t.chunk_eos
        else:  # the first draw matters only where it is <|chunk_eos|>
            pauses = self.rng.random() < float((logits_V[t.chunk_eos].double() - logits_V.double().logsumexp(-1)).exp())
        if pauses:
            return t.chunk_eos
        logits_V.index_fill_(0, self._not_now, -torch.inf)
        if c.repetition_penalty != 1.0 and self.recent:
            # Divides whatever the sign, as MiniCPM-o does: a negative logit rises.
            logits_V[sorted(set(self.recent))] /= c.repetition_penalty
        if c.length_penalty != 1.0:
            turn_eos = logits_V[t.turn_eos]
            logits_V[t.turn_eos] = turn_eos / c.length_penalty if turn_eos > 0 else turn_eos * c.length_penalty
        if c.listen_prob_scale != 1.0:
            logits_V[t.listen] *= c.listen_prob_scale
        if c.greedy:
            token = int(logits_V.argmax())
        else:
            ids_N, probability_N = candidates(logits_V / c.temperature, c.top_k, c.top_p)
            cumulative_N = probability_N.cumsum(-1)
            at = int(torch.searchsorted(cumulative_N, cumulative_N[-1] * self.rng.random(), right=True))
            token = int(ids_N[min(at, len(ids_N) - 1)])
        self.recent.append(token)
        return token

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self.recent), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent = deque(state["recent"], maxlen=self.config.repetition_window)
        self.rng.bit_generator.state = state["rng"]


def candidates(logits_V: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Ids and probabilities (float64, adding up to 1) of the `top_k` likeliest tokens' nucleus, likeliest first.

    Ties with the k-th stay; the token that passes `top_p` is kept.  `top_k` 0 keeps every token.
    """
    if top_k:
        kth = logits_V.topk(min(top_k, len(logits_V))).values[-1]
        ids_N = ((logits_V >= kth) & (logits_V > -torch.inf)).nonzero()[:, 0]
    else:
        ids_N = (logits_V > -torch.inf).nonzero()[:, 0]
    ordered_N, order_N = logits_V[ids_N].double().sort(descending=True, stable=True)
    probability_N = ordered_N.softmax(-1)
    nucleus_N = probability_N.cumsum(-1) - probability_N <= top_p
    return ids_N[order_N[nucleus_N]], probability_N[nucleus_N] / probability_N[nucleus_N].sum()
