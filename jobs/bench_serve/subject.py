"""What is measured: a real language model that is told what to say, and the plain loop that it is held against.

Every unit listens and writes `WORDS` words, so that all systems do the same work; the forwards, the output matrix and
the caches are the model's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import Conversation, ConversationConfig, Engine, EngineConfig
from a2t.duplex.protocol import SpecialTokens, UnitTokens, after_audio
from a2t.kv.cache import PackedBatch
from a2t.kv.kinds import Kind
from a2t.models.base import DuplexModel
from a2t.models.language import Qwen3OverArena
from a2t.models.tiny import ADAPTER, WordTokenizer, load_tiny

WORDS = 3
UNIT = 16_000
SILENCE = np.zeros(UNIT, np.float32)
SURE = 1e4


class Told:
    """A DuplexModel whose language model runs in full and is then overruled: listen, open the segment, write `WORDS`
    words."""

    default_prompt = ""

    def __init__(self, name: str, causal_lm: Any, tokenizer: WordTokenizer, encoder: Any):
        self.name, self.tokenizer, self.encoder = name, tokenizer, encoder
        self.causal_lm = causal_lm
        self.language = Qwen3OverArena(causal_lm)
        self.shape = self.language.shape
        self.tokens = SpecialTokens.from_lookup(tokenizer.token_id)
        assert self.tokens.asr_start is not None and self.tokens.asr_end is not None
        self.word = tokenizer.size - 1
        self._ids: list[int] = []
        self._left: dict[int, int] = {}  # words still to write, by row
        self._says: list[int] = []

    @property
    def weight_bytes(self) -> int:
        """What one forward reads of the weights: the layers and the output matrix."""
        layers = sum(p.nbytes for p in self.causal_lm.model.layers.parameters())
        return layers + self.causal_lm.lm_head.weight.nbytes

    def embed(self, ids_T: Tensor) -> Tensor:
        self._ids = ids_T.tolist()
        return self.language.embed(ids_T)

    def forward(self, e_TD: Tensor, positions_T: Tensor, batch: PackedBatch) -> Tensor:
        self._says = []
        for row, begin, count in zip(batch.rows, batch.offsets, batch.counts, strict=True):
            ids = self._ids[begin : begin + count]
            audio = max((n for n, i in enumerate(ids) if i == 0), default=count - 1)
            if ids[audio] == 0:
                self._left[row] = WORDS
            self._says += [self._next(row, token) for token in ids[audio:]]
        return self.language.forward(e_TD, positions_T, batch)

    def logits(self, h_ND: Tensor) -> Tensor:
        out_NV = self.language.logits(h_ND)
        assert len(out_NV) == len(self._says), "each row asks for its last position, or for those drafted behind audio"
        out_NV[range(len(out_NV)), self._says] = SURE
        return out_NV

    def _next(self, row: int, fed: int) -> int:
        t = self.tokens
        assert t.asr_start is not None and t.asr_end is not None
        if fed == 0:
            return t.listen
        if fed == t.listen:
            return t.asr_start
        if not self._left[row]:
            return t.asr_end
        self._left[row] -= 1
        return self.word


class Noise:
    """An encoder of no cost: a new embedding a unit."""

    embeddings_per_unit, samples_per_unit = 10, UNIT

    def __init__(self, hidden: int):
        self.e_AD = 0.02 * torch.randn((10, hidden), generator=torch.Generator().manual_seed(0))

    def new_state(self) -> Any:
        return Ready()

    def encode(self, states: Sequence[Any]) -> Tensor:
        for state in states:
            state.units_ready -= 1
        return self.e_AD.expand(len(states), -1, -1)


class Ready:
    units_ready = nbytes = 0

    def push(self, pcm_S: np.ndarray) -> None:
        self.units_ready += len(pcm_S) // UNIT


def embedded() -> Told:
    model = load_tiny(adapter=ADAPTER)
    return Told("embedded", model.modules.llm, model.tokenizer, model.encoder)


QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def qwen3(**sizes: int) -> Told:
    """The shape of Qwen3-0.6B, or another; random weights in float32."""
    config = Qwen3Config(**{**QWEN3_06B, **sizes}, max_position_embeddings=262_144, tie_word_embeddings=True)
    with torch.device("meta"):
        lm = Qwen3ForCausalLM(config)
    lm = lm.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in lm.named_parameters():
            p.fill_(1.0) if "norm" in name else p.normal_(0, 0.02, generator=generator)
    lm.model.rotary_emb = type(lm.model.rotary_emb)(config)
    tokenizer = WordTokenizer.of_words([f"w{n}" for n in range(40)])
    return Told("qwen3", lm, tokenizer, Noise(config.hidden_size))


SIZES = {"embedded": embedded, "qwen3-0.6b": qwen3}
UNIT_POSITIONS = 1 + 10 + 1 + 2 + WORDS + 1


def make_engine(model: Told, rows: int, residents: int, clock: Callable[[], float] = time.perf_counter) -> Engine:
    duplex: DuplexModel = model  # type: ignore[assignment]  # its encoder takes only states of its own making
    config = EngineConfig(side_channel_budget_s=None, scratch_rows=0)
    return Engine(duplex, rows, residents + 160, clock=clock, config=config)


def open_at(engine: Engine, budget: int, units: int = 0, seed: int = 0) -> Conversation:
    """A conversation in the state it has after `units` units (its keys and values are random)."""
    policy = {"text_tier": "fold"}
    config = ConversationConfig(budget, policy_options=policy, duplex=DuplexConfig(), audio_units_kept=1)
    c = engine.open(config)
    tokens = engine.tokens
    _, kinds = after_audio(tokens, UnitTokens((tokens.listen,), (tokens.unit,) * WORDS))
    for unit in range(units):
        c.ledger.append([Kind.MARKER] + [Kind.AUDIO] * 10 + kinds, unit)
        c.ledger.drop(c.policy.plan_eviction(c.ledger, budget).drop)
    c.loop.next_unit, c.journal.next_position = units, c.ledger.next_position
    length = c.ledger.residents
    row_N2HLD = engine.arena.kv_N2RHCD[:, :, c.row, :, :length]
    row_N2HLD.normal_(generator=torch.Generator().manual_seed(seed))
    engine.arena.lengths[c.row] = length
    return c


def units_to(residents: int) -> int:
    """After how many units a conversation has come to so many residents, nothing evicted."""
    return -(-residents // UNIT_POSITIONS)


class PlainLoop:
    """The same units by the usual means: a transformers `DynamicCache`, a forward for each token, `index_select` for
    what stays. Same weights, same attention library, same audio encoder, same choice of what leaves."""

    def __init__(self, model: Told, budget: int, retention_units: int = 5):
        self.model, self.budget, self.retention_units = model, budget, retention_units
        self.lm = model.causal_lm
        self.cache = DynamicCache(config=self.lm.config)
        self.held: list[tuple[bool, int]] = []  # (evictable, unit) a resident, oldest first
        self.position = 0
        self.units = 0
        self.state = model.encoder.new_state()

    @torch.no_grad()
    def unit(self) -> None:
        t, model = self.model.tokens, self.model
        assert t.asr_start is not None and t.asr_end is not None
        self.state.push(SILENCE)
        audio_AD = model.encoder.encode([self.state])[0]
        marker_1D = self.lm.model.embed_tokens(torch.tensor([t.unit]))
        self._feed(torch.cat([marker_1D, audio_AD]))
        for ids in ([t.listen], [t.asr_start], *[[model.word]] * WORDS, [t.asr_end, t.unit_end]):
            self._feed(self.lm.model.embed_tokens(torch.tensor(ids)))
        text = range(UNIT_POSITIONS - 2 - WORDS, UNIT_POSITIONS - 2)
        self.held += [(n not in text, self.units) for n in range(UNIT_POSITIONS)]
        self.units += 1
        self._evict()

    def _feed(self, e_TD: Tensor) -> None:
        positions_1T = torch.arange(self.position, self.position + len(e_TD))[None]
        self.position += len(e_TD)
        out = self.lm(
            inputs_embeds=e_TD[None],
            position_ids=positions_1T,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        int(out.logits[0, -1].argmax())

    def _evict(self) -> None:
        if len(self.held) <= self.budget:
            return
        recent = self.units - self.retention_units
        leaving = {u for evictable, u in self.held if evictable and u < recent}
        gone: set[int] = set()
        for unit in sorted(leaving):
            if len(self.held) - len(gone) <= self.budget:
                break
            gone |= {n for n, held in enumerate(self.held) if held == (True, unit)}
        keep = [n for n in range(len(self.held)) if n not in gone]
        index = torch.tensor(keep)
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys.index_select(2, index), layer.values.index_select(2, index)
        self.held = [self.held[n] for n in keep]

    def fill(self, c: Conversation, engine: Engine) -> None:
        """The state that a conversation of the engine is in, in order of position."""
        order = sorted(range(len(c.ledger)), key=c.ledger.positions.__getitem__)
        saved = engine.arena.gather(c.row, order)
        for layer in range(self.model.shape.layers):
            self.cache.update(saved["keys"][layer][None], saved["values"][layer][None], layer)
        self.held = [(c.ledger.kinds[n].evictable, c.ledger.units[n]) for n in order]
        self.position, self.units = c.ledger.next_position, c.loop.next_unit
