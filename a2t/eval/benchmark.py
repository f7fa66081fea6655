"""What a unit costs at a model's sizes: random weights, a scripted conversation, this engine beside a plain cache.

Weights are random, so what the model would say means nothing: a script says it instead, after the model has
computed its logits in full.  Both sides feed the same tokens.  Everything is measured in one run on one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from a2t.duplex.conversation import Conversation, ConversationConfig
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import Engine, EngineConfig
from a2t.duplex.protocol import TOKEN_TEXT, SpecialTokens
from a2t.duplex.unit_loop import Steps, UnitLoop
from a2t.eval.latency import Latency, unit_latency
from a2t.models.minicpmo import MiniCPMO
from a2t.models.whisper_stream import Projection, StreamingWhisper, whisper_config

RATE = 16_000
PAGE = 256  # rows of the arena are whole pages of the CUDA kernel
TRIAL_UNITS = 20  # a whole cycle of the script, at a full cache


@dataclass(frozen=True)
class Sizes:
    """Of a language model and its audio encoder."""

    language: dict[str, int]
    encoder: dict[str, int]
    says: str


MINICPMO_45 = Sizes(
    {
        "vocab_size": 151_748, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    {
        "num_mel_bins": 80, "d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4096, "max_source_positions": 1500,
    },
    "MiniCPM-o 4.5's sizes (Qwen3-8B, Whisper-medium), random weights",
)  # fmt: skip
TINY = Sizes(
    {
        "vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
    {
        "num_mel_bins": 80, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "max_source_positions": 1500,
    },
    "tiny sizes, random weights: shows that the benchmark runs, measures no model",
)  # fmt: skip


class ScriptTokenizer:
    """TextTokenizer (a2t.models.base) of a vocabulary without words: the special tokens are its last ids."""

    def __init__(self, vocab: int):
        self.ids = {text: vocab - len(TOKEN_TEXT) + n for n, text in enumerate(TOKEN_TEXT.values())}

    def encode(self, text: str) -> list[int]:
        return [10 + n % 50 for n in range(len(text))]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("." for i in ids if i not in self.ids.values())

    def token_id(self, token: str) -> int | None:
        return self.ids.get(token)


def random_minicpmo(sizes: Sizes, dtype: torch.dtype, device: str, seed: int = 0) -> MiniCPMO:
    """MiniCPM-o's modules with random weights, made on `device`."""
    config = Qwen3Config(**sizes.language, tie_word_embeddings=False)
    whisper = whisper_config(sizes.encoder, "the benchmark's encoder")
    with torch.device("meta"):
        lm, encoder = Qwen3ForCausalLM(config), WhisperEncoder(whisper)
        projection = Projection(whisper.d_model, config.hidden_size)
    generator = torch.Generator(device).manual_seed(seed)
    for module in (lm, encoder, projection):
        module.to(dtype).to_empty(device=device)
        for owner in module.modules():
            for p in owner.parameters(recurse=False):
                p.requires_grad_(False)
                if isinstance(owner, Qwen3RMSNorm | nn.LayerNorm):
                    p.fill_(1.0)
                else:
                    p.normal_(0.0, 0.02, generator=generator)
    lm.model.rotary_emb = Qwen3RotaryEmbedding(config).to(device)
    audio = StreamingWhisper(encoder, projection, pool=5)
    tokenizer: Any = ScriptTokenizer(config.vocab_size)
    return MiniCPMO(lm, audio, tokenizer, "random")


@dataclass(frozen=True)
class Said:
    """What the script has a unit say: native tokens, and the transcript's, None where the side channel stays shut."""

    native: tuple[int, ...]
    segment: tuple[int, ...] | None


def script(tokens: SpecialTokens, unit: int) -> Said:
    """A cycle of 20 s: ten of the user's speech with three text tokens written down in each, two of silence, eight of
    an answer with ten tokens in each."""
    at = unit % 20
    if at < 12:
        return Said((tokens.listen,), (200, 201, 202) if at < 10 else None)
    words = tuple(range(100, 110))
    first, last = ((tokens.speak,) if at == 12 else ()), ((tokens.turn_eos,) if at == 19 else ())
    return Said((*first, *words, *last, tokens.chunk_eos), None)


def following(tokens: SpecialTokens, said: Said) -> tuple[int, dict[int, int]]:
    """The token after a unit's audio, and the token after each token that it feeds."""
    assert tokens.asr_start is not None and tokens.asr_end is not None
    fed = list(said.native)
    if said.segment is not None:
        fed[1:1] = [tokens.asr_start, *said.segment, tokens.asr_end]
    assert len(set(fed)) == len(fed), "a script names each token of a unit once"
    return fed[0], dict(pairwise(fed))


class ScriptedLoop(UnitLoop):
    """A unit loop whose model predicts what the script says, at the cost of its own prediction."""

    phase = 0

    def unit(self, audio_AD: Tensor, force_listen: bool = False) -> Steps:
        first, after = following(self.tokens, script(self.tokens, self.next_unit + self.phase))
        steps = super().unit(audio_AD, force_listen)
        try:
            feed = next(steps)
            while True:
                reply = yield feed
                if reply.logits is not None:
                    for logits_V, token in zip(reply.logits, feed.ids[-feed.want :], strict=True):
                        said = after.get(token, first if token < 0 else None)
                        if said is not None:
                            logits_V[said] = 1e4
                feed = steps.send(reply)
        except StopIteration as end:
            return end.value


class ScriptedEngine(Engine):
    def admit(self, config: ConversationConfig, id: str | None) -> Conversation:
        conversation = super().admit(config, id)
        loop = ScriptedLoop(self.tokens, self.model.tokenizer.decode, config.duplex)
        loop.phase = 7 * (len(self.conversations) - 1)  # not everybody speaks at once
        conversation.loop = loop
        return conversation


@dataclass(frozen=True)
class Run:
    """One measured run. `minutes_ms`: mean unit time of each minute; `kv_bytes`: of one conversation at its end, and
    `kv_bytes_on_paper` the same from the sizes alone; `peak_bytes`: of the device's memory, weights included (null on
    a CPU)."""

    what: str
    conversations: int
    unit_ms: Latency
    minutes_ms: list[float]
    residents_peak: int
    residents_end: int
    kv_bytes: int
    kv_bytes_on_paper: int
    peak_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def seconds(count: int, seed: int = 0) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield (0.1 * rng.standard_normal(RATE)).astype(np.float32)


def arena_run(
    model: MiniCPMO,
    conversations: int,
    units: int,
    budget: int,
    prompt_tokens: int = 32,
    on_unit: Callable[[], None] = lambda: None,
) -> Run:
    """`conversations` at once, a unit each at the same moment (the worst that can arrive), for `units` seconds."""
    _reset_peak(model)
    duplex = DuplexConfig.of(model, chunk_char_limit=None)
    config = ConversationConfig(budget=budget, duplex=duplex, system_prompt="." * prompt_tokens)
    text = prompt_tokens + 6 * units + 100  # what no eviction takes away
    capacity = -(-(max(budget, text) + 240) // PAGE) * PAGE
    engine = ScriptedEngine(
        model, conversations, capacity, config=EngineConfig(side_channel_budget_s=None, scratch_rows=0)
    )
    opened = [engine.open(config) for _ in range(conversations)]
    engine.run()
    spent: list[list[float]] = []
    peak = 0
    for pcm_S in seconds(units):
        for conversation in opened:
            engine.push(conversation, pcm_S)
        done = [stats for _, _, stats in engine.run()]
        spent.append([stats.wait_ms + stats.unit_ms for stats in done])
        peak = max(peak, *(stats.peak for stats in done))
        on_unit()
    row = opened[0].row
    held = sum(t.nbytes for t in engine.arena.export(row).values())
    return Run(
        f"a2t, budget {budget}",
        conversations,
        unit_latency(ms for unit in spent for ms in unit),
        _by_minute([float(np.mean(unit)) for unit in spent]),
        peak,
        opened[0].ledger.residents,
        held,
        engine.arena.lengths[row] * model.shape.bytes_per_position,
        _peak(model),
    )


@torch.inference_mode()
def plain_run(model: MiniCPMO, units: int, prompt_tokens: int = 32, on_unit: Callable[[], None] = lambda: None) -> Run:
    """One conversation over transformers' own DynamicCache, which grows: the same audio, the same tokens."""
    _reset_peak(model)
    lm: Any = model.lm
    tokens, device = model.tokens, model.shape.device
    cache, state, position = DynamicCache(), model.encoder.new_state(), 0

    def feed(e_TD: Tensor) -> int:
        nonlocal position
        at_T = torch.arange(position, position + len(e_TD), device=device)
        out = lm.model(inputs_embeds=e_TD[None], position_ids=at_T[None], cache=cache, use_cache=True)
        position += len(e_TD)
        return int(lm.lm_head(out.last_hidden_state[0, -1:]).float().argmax())

    def embed(ids: Iterable[int]) -> Tensor:
        return model.embed(torch.tensor(list(ids), device=device))

    feed(embed(model.tokenizer.encode("." * prompt_tokens)))
    spent: list[float] = []
    for unit, pcm_S in enumerate(seconds(units)):
        start = time.perf_counter()
        state.push(pcm_S)
        feed(torch.cat([embed([tokens.unit]), model.encoder.encode([state])[0].to(model.shape.dtype)]))
        first, after = following(tokens, script(tokens, unit))
        fed = [first]
        while fed[-1] in after:
            fed.append(after[fed[-1]])
        for token in fed[:-1]:
            feed(embed([token]))
        feed(embed([fed[-1], tokens.unit_end]))
        spent.append(1000 * (time.perf_counter() - start))
        on_unit()
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    length = cache.get_seq_length()
    return Run(
        "transformers DynamicCache, no eviction",
        1,
        unit_latency(spent),
        _by_minute(spent),
        length,
        length,
        held,
        length * model.shape.bytes_per_position,
        _peak(model),
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, 1 at least, where whatever is below a number that fits does too."""
    good, bad = 1, most + 1
    while bad - good > 1:
        trial = min(2 * good, most) if bad > most else (good + bad) // 2
        if fits(trial):
            good = trial
        else:
            bad = trial
        if good == most:
            break
    return good


def _by_minute(unit_ms: Sequence[float]) -> list[float]:
    return [round(float(np.mean(unit_ms[n : n + 60])), 3) for n in range(0, len(unit_ms), 60)]


def _reset_peak(model: MiniCPMO) -> None:
    if model.shape.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(model.shape.device)


def _peak(model: MiniCPMO) -> int | None:
    return torch.cuda.max_memory_allocated(model.shape.device) if model.shape.device.type == "cuda" else None
