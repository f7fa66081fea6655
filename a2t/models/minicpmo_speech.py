"""MiniCPM-o's voice: its speech-token decoder (`tts.`, a Llama of transformers) and Token2Wav after it.

A unit's text tokens with the language model's hidden states become a condition; from it the decoder draws up to 25
audio tokens (25 a second), which Token2Wav, a package of the model's makers, turns into sound.  Shape suffixes: N
positions, D decoder width, H language model width, V audio tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaModel

from a2t.models.checkpoint import Checkpoint, whole

PREFIX = "tts."
UNUSED = frozenset({"model.embed_tokens.weight"})  # present in checkpoints; text has its own table here
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
TABLES = ("llm_dim", "num_audio_tokens", "num_text_tokens")
SUPPORTED = {
    "backbone_model": "llama", "condition_type": "hidden_text_merge", "projector_type": "mlp", "num_vq": 1,
    "attention_type": "full_attention",
}  # fmt: skip


@dataclass(frozen=True)
class SpeechSettings:
    """How audio tokens are drawn; the defaults are MiniCPM-o's duplex loop's."""

    temperature: float = 0.8
    top_k: int = 25
    top_p: float = 0.85
    repetition_penalty: float = 1.05
    repetition_window: int = 16  # audio tokens of the same chunk
    max_tokens_per_chunk: int = 26  # the last one drawn is never returned
    seed: int = 0


class _Mlp(nn.Module):
    def __init__(self, width: int, out: int):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(width, out), nn.Linear(out, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x).relu())


class _Modules(nn.Module):
    """The tensors under `tts.`, by their names."""

    def __init__(self, values: dict[str, Any], llama: LlamaConfig):
        super().__init__()
        width = values["hidden_size"]
        self.projector_spk = _Mlp(values["llm_dim"], width)  # the voice's reference; not used in the duplex loop
        self.projector_semantic = _Mlp(values["llm_dim"], width)
        self.emb_code = nn.ModuleList([nn.Embedding(values["num_audio_tokens"], width)])
        self.emb_text = nn.Embedding(values["num_text_tokens"], width)
        self.model = LlamaModel(llama)
        self.model.embed_tokens = nn.Identity()  # type: ignore[assignment]
        head = nn.Linear(width, values["num_audio_tokens"], bias=False)
        self.head_code = nn.ModuleList([nn.utils.parametrizations.weight_norm(head, dim=0)])


class SpeechTokens:
    """The speech-token decoder's weights, shared by conversations."""

    def __init__(self, modules: _Modules, values: dict[str, Any]):
        self.modules = modules.eval()
        self.audio_bos: int = values["audio_bos_token_id"]
        self.normalize: bool = bool(values.get("normalize_projected_hidden"))
        self.eos: int = values["num_audio_tokens"] - 1
        self.max_positions: int = values["max_position_embeddings"]

    @torch.no_grad()
    def condition(self, ids: Sequence[int], hidden_NH: Tensor | None) -> Tensor:
        """What is fed before the audio tokens, [n + 1, D]: each text token's embedding plus its projected (and
        L2-normalised) hidden state, then the embedding that begins the audio."""
        m = self.modules
        device, dtype = m.emb_text.weight.device, m.emb_text.weight.dtype
        begin_1D = m.emb_text(torch.tensor([self.audio_bos], device=device))
        if not ids:
            return begin_1D
        if hidden_NH is None or len(hidden_NH) != len(ids):
            raise ValueError(
                f"{len(ids)} tokens came with {0 if hidden_NH is None else len(hidden_NH)} hidden states: the speech "
                "decoder needs the language model's final hidden state of each"
            )
        said_ND = m.projector_semantic(hidden_NH.to(device=device, dtype=dtype))
        if self.normalize:
            said_ND = F.normalize(said_ND, p=2, dim=-1)
        return torch.cat([m.emb_text(torch.tensor(list(ids), device=device)) + said_ND, begin_1D])


class SpeechTokenStream:
    """One conversation's audio tokens. The cache lasts from chunk to chunk and is dropped at the end of a turn."""

    def __init__(self, decoder: SpeechTokens, settings: SpeechSettings | None = None):
        self.decoder, self.settings = decoder, settings or SpeechSettings()
        self._rng = torch.Generator().manual_seed(self.settings.seed)
        self.reset()

    def reset(self) -> None:
        self.cache = DynamicCache()
        self.position = 0  # the next one; MiniCPM-o calls it text_start_pos
        self.chunks = 0  # of this turn

    @torch.no_grad()
    def chunk(self, ids: Sequence[int], hidden_NH: Tensor | None, end_of_turn: bool) -> tuple[list[int], list[Tensor]]:
        """A unit's audio tokens and the raw logits [V] of each step.

        Inside a turn a chunk is always filled; its first and its last chunk may end early, at the model's end token.
        The last token drawn is never returned nor fed.  ValueError where the turn outgrows the decoder's positions.
        """
        s, d = self.settings, self.decoder
        x_ND = d.condition(ids, hidden_NH)
        if self.position + len(x_ND) + s.max_tokens_per_chunk > d.max_positions:
            raise ValueError(
                f"this turn has reached position {self.position} of the speech decoder's {d.max_positions}: end it"
            )
        least = s.max_tokens_per_chunk if self.chunks and not end_of_turn else 0
        tokens: list[int] = []
        steps: list[Tensor] = []
        for step in range(s.max_tokens_per_chunk):
            logits_V = self._forward(x_ND)
            steps.append(logits_V)
            token = self._draw(logits_V, tokens, allow_end=step >= least)
            if token == d.eos or step == s.max_tokens_per_chunk - 1:
                break
            tokens.append(token)
            x_ND = d.modules.emb_code[0](torch.tensor([token], device=x_ND.device))
        self.chunks += 1
        if end_of_turn:
            self.reset()
        return tokens, steps

    def _forward(self, x_ND: Tensor) -> Tensor:
        m = self.decoder.modules
        positions_N = torch.arange(self.position, self.position + len(x_ND), device=x_ND.device)
        h_ND = m.model(
            inputs_embeds=x_ND[None], position_ids=positions_N[None], cache=self.cache, use_cache=True
        ).last_hidden_state[0]
        self.position += len(x_ND)
        return m.head_code[0](h_ND[-1]).float()

    def _draw(self, logits_V: Tensor, tokens: Sequence[int], allow_end: bool) -> int:
        s = self.settings
        scores_V = logits_V.cpu() / s.temperature
        recent = torch.tensor(tokens[-s.repetition_window :], dtype=torch.long)
        # A token's penalty grows with how often it was drawn lately.
        penalty_V = s.repetition_penalty ** torch.bincount(recent, minlength=len(scores_V)).float()
        scores_V = torch.where(scores_V < 0, scores_V * penalty_V, scores_V / penalty_V)
        if not allow_end:
            scores_V[self.decoder.eos] = -torch.inf
        ordered_V, order_V = scores_V.sort(descending=True)
        probability_V = ordered_V.softmax(-1)
        keep_V = (probability_V.cumsum(-1) - probability_V <= s.top_p) & (torch.arange(len(order_V)) < s.top_k)
        keep_V[:3] = True  # MiniCPM-o's choice is always among three at least
        drawn = torch.multinomial(ordered_V.masked_fill(~keep_V, -torch.inf).softmax(-1), 1, generator=self._rng)
        return int(order_V[drawn])


def load_speech_tokens(
    path: str | Path | Checkpoint, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> SpeechTokens:
    """The decoder in a checkpoint.  ValueError naming what is missing or not supported."""
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path, [PREFIX])
    with torch.device("meta"):
        modules = modules_of(checkpoint)
    checkpoint.load_into(modules, PREFIX, dtype, device, unused=UNUSED)
    rotary = type(modules.model.rotary_emb)
    modules.model.rotary_emb = rotary(modules.model.config).to(device)
    return SpeechTokens(modules, checkpoint.config["tts_config"])


def modules_of(checkpoint: Checkpoint) -> _Modules:
    """The modules that config.json describes, without their weights.  ValueError naming what is missing or not
    supported."""
    values, where = checkpoint.config.get("tts_config"), f"{checkpoint.where}, tts_config"
    if not isinstance(values, dict):
        raise ValueError(f"{checkpoint.where} has no tts_config: this checkpoint has no voice")
    for name, wanted in SUPPORTED.items():
        if values.get(name, wanted) != wanted:
            raise ValueError(f"{where}: {name} is {values[name]!r}; only {wanted!r} is supported")
    sizes = {name: whole(values, name, where) for name in (*SIZES, *TABLES)}
    width, heads, kv_heads = (sizes[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if width % heads or heads % kv_heads:
        raise ValueError(f"{where}: hidden_size {width}, {heads} attention heads and {kv_heads} for keys do not divide")
    begin = values.get("audio_bos_token_id")
    if not isinstance(begin, int) or not 0 <= begin < sizes["num_text_tokens"]:
        raise ValueError(f"{where}: audio_bos_token_id is {begin!r}, no token below {sizes['num_text_tokens']}")
    llama = LlamaConfig(**{name: sizes[name] for name in SIZES}, vocab_size=1, bos_token_id=None, eos_token_id=None)
    return _Modules(values, llama)


class Token2Wav(Protocol):
    """What is used of `stepaudio2.Token2wav`: one stream's state at a time, in two attributes."""

    stream_cache: Any
    hift_cache_dict: Any

    def set_stream_cache(self, prompt_wav: str) -> tuple[Any, Any]: ...

    def stream(self, generated_speech_tokens: list[int], prompt_wav: str | None, last_chunk: bool) -> bytes: ...


def load_token2wav(folder: str | Path) -> Token2Wav:
    """Token2Wav over a checkpoint's `assets/token2wav`; needs CUDA and the optional package `minicpmo-utils`.
    ValueError saying how to get it where it is not installed.

    It is that package which reads those files, a YAML with object tags among them: load it from a checkpoint that you
    trust.  Everything else of this project reads tensors only.
    """
    try:
        from stepaudio2 import Token2wav
    except ImportError as error:
        raise ValueError(
            f"MiniCPM-o's voice needs the package minicpmo-utils ({error}): pip install 'a2t[voice]', in an "
            "environment that was not made with constraints.txt; or go without sound"
        ) from error
    if not torch.cuda.is_available():
        raise ValueError(
            "MiniCPM-o's voice (Token2Wav) runs on a CUDA device only, and there is none; go without sound"
        )
    try:
        return Token2wav(str(folder))
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} lacks a file that the installed minicpmo-utils asks for ({error}): releases from 1.0.7 on read "
            "another vocoder's files than those before, so install the other kind, as with minicpmo-utils==1.0.4"
        ) from error


class MiniCPMOSpeech:
    """SpeechDecoder of a2t.models.speech: text tokens to sound, in the voice of `prompt_wav`.

    Conversations share the vocoder; each keeps its own state of it and lends it for the time of a call.
    """

    def __init__(
        self, tokens: SpeechTokens, vocoder: Token2Wav, prompt_wav: str | Path, settings: SpeechSettings | None = None
    ):
        self.tokens, self.vocoder, self.prompt_wav, self.settings = tokens, vocoder, str(prompt_wav), settings
        # Releases of the package differ: all return the new state, and only the latest also keep it themselves.
        self._fresh = _cloned(vocoder.set_stream_cache(self.prompt_wav))

    def open(self) -> MiniCPMOSpeechStream:
        return MiniCPMOSpeechStream(self)

    def fresh(self) -> Any:
        """The vocoder's state at the beginning of a turn."""
        return _cloned(self._fresh)


class MiniCPMOSpeechStream:
    """SpeechStream of a2t.models.speech.

    The vocoder takes 25 tokens (a second) with the 3 after them; a turn begins with 3 of silence, so that its first
    second can be spoken when 25 tokens are there.
    """

    CHUNK, LOOKAHEAD, SILENCE = 25, 3, 4218

    def __init__(self, voice: MiniCPMOSpeech):
        self.voice = voice
        self.tokens = SpeechTokenStream(voice.tokens, voice.settings)
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._held = [self.SILENCE] * self.LOOKAHEAD
        self._state = self.voice.fresh()

    def say(self, ids: Sequence[int], hidden_ND: Tensor | None, text: str, end_of_turn: bool) -> np.ndarray:
        drawn, _ = self.tokens.chunk(ids, hidden_ND, end_of_turn)
        self._held += drawn
        pcm: list[np.ndarray] = []
        while len(self._held) >= self.CHUNK + self.LOOKAHEAD:
            pcm.append(self._speak(self._held[: self.CHUNK + self.LOOKAHEAD], last=False))
            self._held = self._held[self.CHUNK :]
        if end_of_turn:
            pcm.append(self._speak(self._held, last=True))
            self._begin_turn()
        return np.concatenate(pcm) if pcm else np.zeros(0, np.float32)

    def stop(self) -> None:
        self.tokens.reset()
        self._begin_turn()

    def _speak(self, tokens: list[int], last: bool) -> np.ndarray:
        vocoder = self.voice.vocoder
        vocoder.stream_cache, vocoder.hift_cache_dict = self._state
        pcm = vocoder.stream(tokens, self.voice.prompt_wav, last_chunk=last)
        # Copied: parts of it are buffers of the vocoder, which the next call writes into, whoever makes it.
        self._state = _cloned((vocoder.stream_cache, vocoder.hift_cache_dict))
        return np.frombuffer(pcm, "<i2").astype(np.float32) / 32768


def _cloned(state: Any) -> Any:
    """A copy of nested dicts, lists and tuples of tensors."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _cloned(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_cloned(value) for value in state)
    return state


def load_minicpmo_speech(
    path: str | Path, prompt_wav: str | Path, device: str | torch.device = "cuda", dtype: torch.dtype | None = None
) -> MiniCPMOSpeech:
    """The voice of a checkpoint: its `tts.` decoder and its `assets/token2wav`, speaking like `prompt_wav`."""
    checkpoint = Checkpoint.open(path)
    folder = checkpoint.folder / "assets" / "token2wav"
    if not folder.is_dir():
        raise ValueError(f"{checkpoint.folder} has no assets/token2wav: download the checkpoint with its assets")
    if not Path(prompt_wav).is_file():
        raise ValueError(f"there is no file {prompt_wav}: give a recording of the voice to speak in")
    return MiniCPMOSpeech(load_speech_tokens(checkpoint, dtype, device), load_token2wav(folder), prompt_wav)
