"""`a2t doctor PATH`: what is in a checkpoint, what is missing, what it will need in memory.  Loads no weights.

The command's arguments are in a2t.cli.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3ForCausalLM
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.protocol import TOKEN_TEXT, SpecialTokens
from a2t.duplex.unit_loop import UnitLoop
from a2t.models import minicpmo, minicpmo_speech
from a2t.models.adapters import SIDE_CHANNEL
from a2t.models.checkpoint import Checkpoint
from a2t.models.memory import ConversationMemory, on_paper
from a2t.models.whisper_stream import FRAMES, Projection, whisper_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OTHER_PARTS = {"vpm": "vision, not used", "resampler": "vision, not used"}


@dataclass
class Part:
    """The tensors of a checkpoint under one prefix."""

    prefix: str
    what: str
    tensors: int
    parameters: int
    bytes: int
    dtypes: list[str]
    needed: bool
    problems: list[str] = field(default_factory=list)


@dataclass
class Examination:
    folder: Path
    model_type: str
    parts: list[Part]
    notes: list[str]  # worth knowing
    missing: list[str]  # without which it will not run
    weights: int  # bytes of what is read, in the dtype asked for
    memory: ConversationMemory | None
    unit_positions: int = 0


def examine(path: str | Path, dtype: torch.dtype | None = None) -> Examination:
    """Reads headers, configuration and tokenizer.  ValueError where there is no checkpoint to examine at all."""
    checkpoint = Checkpoint.open(path)
    kind = str(checkpoint.config.get("model_type"))
    if kind == "minicpmo":
        parts, notes, missing = _minicpmo(checkpoint)
    elif kind == "a2t-embedded":
        parts, notes, missing = _embedded(checkpoint)
    else:
        raise ValueError(f"{checkpoint.folder} is of model type {kind!r}: a2t runs minicpmo and a2t-embedded")
    missing += [f"{part.prefix} {problem}" for part in parts if part.needed for problem in part.problems[:3]]
    read = [part for part in parts if part.needed]
    loaded = dtype or (_dtype_of(checkpoint, parts[0].prefix) if parts[0].tensors else torch.bfloat16)
    weights = sum(part.parameters * dtype.itemsize if dtype else part.bytes for part in read)
    if kind == "a2t-embedded" and dtype is None:
        loaded, weights = torch.float32, sum(part.parameters for part in read) * 4  # loaded wider than it is stored
    tokens = SpecialTokens(*range(len(TOKEN_TEXT)))
    room = UnitLoop(tokens, lambda _: "", DuplexConfig()).positions_per_unit(_audio_per_unit(checkpoint))
    return Examination(
        checkpoint.folder, kind, parts, notes, missing, weights, on_paper(checkpoint.config, loaded), room
    )


def _audio_per_unit(checkpoint: Checkpoint) -> int:
    return FRAMES // checkpoint.config.get("audio_pool_step", 5)


def _part(checkpoint: Checkpoint, prefix: str, what: str, needed: bool, module: nn.Module | None = None) -> Part:
    found = checkpoint.describe(prefix)
    sizes = {name: torch.Size(shape).numel() for name, (shape, _) in found.items()}
    part = Part(
        prefix,
        what,
        tensors=len(found),
        parameters=sum(sizes.values()),
        bytes=sum(sizes[name] * dtype.itemsize for name, (_, dtype) in found.items()),
        dtypes=sorted({str(dtype).removeprefix("torch.") for _, dtype in found.values()}),
        needed=needed,
    )
    if module is not None:
        unused = minicpmo_speech.UNUSED if prefix == minicpmo_speech.PREFIX else frozenset[str]()
        part.problems = checkpoint.problems(module, prefix, unused)
    return part


def _minicpmo(checkpoint: Checkpoint) -> tuple[list[Part], list[str], list[str]]:
    config, notes, missing = checkpoint.config, list[str](), list[str]()
    language = minicpmo.language_config(checkpoint)
    with torch.device("meta"):
        llm = Qwen3ForCausalLM(language)
    parts = [_part(checkpoint, minicpmo.LANGUAGE, "language model (Qwen3)", True, llm)]
    audio = config.get("audio_config")
    if isinstance(audio, dict):
        whisper = whisper_config(audio)
        with torch.device("meta"):
            encoder, projection = WhisperEncoder(whisper), Projection(whisper.d_model, language.hidden_size)
        parts += [
            _part(checkpoint, minicpmo.ENCODER, "audio encoder (Whisper)", True, encoder),
            _part(checkpoint, minicpmo.PROJECTION, "its projection", True, projection),
        ]
    else:
        missing.append("config.json has no audio_config: there is no audio encoder")
    voice = _part(checkpoint, minicpmo_speech.PREFIX, "speech-token decoder", False)
    if voice.tensors:
        parts.append(voice)
    else:
        notes.append("no tts. tensors: it answers in text, without its own voice")
    known = {name for part in parts for name in checkpoint.names(part.prefix)}
    rest = sorted({name.split(".")[0] for name in checkpoint.files if name not in known})
    parts += [_part(checkpoint, f"{top}.", OTHER_PARTS.get(top, "unknown, not used"), False) for top in rest]
    try:
        tokenizer = minicpmo.CheckpointTokenizer.read(checkpoint.folder)
        SpecialTokens.from_lookup(tokenizer.token_id)
    except ValueError as error:
        missing.append(str(error))
        return parts, notes, missing
    spare = language.vocab_size - tokenizer.size
    if all(tokenizer.token_id(t) is not None for t in SIDE_CHANNEL):
        notes.append("the tokenizer knows the side channel's two tokens")
    elif spare >= len(SIDE_CHANNEL):
        notes.append(f"{spare} spare vocabulary rows: the side channel's two tokens take the first two")
    else:
        notes.append(f"{max(spare, 0)} spare vocabulary rows: the matrices grow by the side channel's two tokens")
    return parts, notes, missing


def _embedded(checkpoint: Checkpoint) -> tuple[list[Part], list[str], list[str]]:
    tops = sorted({name.split(".")[0] for name in checkpoint.files})
    parts = [_part(checkpoint, f"{top}.", "part of the embedded model", True) for top in tops]
    parts.sort(key=lambda part: part.prefix != "llm.")
    missing = [] if (checkpoint.folder / "tokenizer.json").is_file() else ["tokenizer.json is missing"]
    adapter = (checkpoint.folder / "adapter" / "adapter_config.json").is_file()
    return parts, ["it has its own adapter" if adapter else "no adapter: it has no side channel"], missing


def _dtype_of(checkpoint: Checkpoint, prefix: str) -> torch.dtype:
    return next(dtype for _, dtype in checkpoint.describe(prefix).values())


def run(args: argparse.Namespace) -> int:
    """0: it can run. 1: something that it needs is missing.  ValueError where there is nothing to look into."""
    if args.conversations < 1 or args.budget < 0:
        raise ValueError(f"{args.conversations} conversations at budget {args.budget}: give at least 1, and 0 or more")
    found = examine(args.path, DTYPES[args.dtype] if args.dtype else None)
    print(_json(found, args) if args.json else _text(found, args))
    return 1 if found.missing else 0


def _needs(found: Examination, args: argparse.Namespace) -> dict[str, int]:
    assert found.memory is not None
    positions = args.budget + found.unit_positions
    each = found.memory.conversation(positions)
    return {
        "bytes_per_position": found.memory.bytes_per_position,
        "positions": positions,
        "language_kv": positions * found.memory.bytes_per_position,
        "encoder_cache": found.memory.encoder_cache,
        "audio_buffer": found.memory.audio_buffer,
        "conversation": each,
        "weights": found.weights,
        "total": found.weights + args.conversations * each,
    }


def _json(found: Examination, args: argparse.Namespace) -> str:
    return json.dumps(
        {
            "folder": str(found.folder),
            "model_type": found.model_type,
            "parts": [asdict(part) for part in found.parts],
            "notes": found.notes,
            "missing": found.missing,
            "memory": _needs(found, args) | {"conversations": args.conversations, "budget": args.budget},
        }
    )


def _text(found: Examination, args: argparse.Namespace) -> str:
    lines = [f"{found.folder}: {found.model_type}", ""]
    for part in found.parts:
        state = "incomplete" if part.problems else "complete" if part.needed else "there"
        lines.append(
            f"  {part.prefix:<24}{part.what:<28}{part.tensors:>5} tensors {part.parameters / 1e6:>10,.2f} M "
            f"{human(part.bytes):>10}  {', '.join(part.dtypes)}  {state}"
        )
    lines += [f"  {note}" for note in found.notes]
    need = _needs(found, args)
    lines += [
        "",
        f"  memory for {args.conversations} conversation(s) at budget {args.budget} "
        f"(and a unit of up to {found.unit_positions} positions on top)",
        f"    weights                  {human(need['weights']):>10}",
        f"    a position               {human(need['bytes_per_position']):>10}",
        f"    a conversation           {human(need['conversation']):>10}  = language model {human(need['language_kv'])}"
        f" + encoder {human(need['encoder_cache'])} + audio {human(need['audio_buffer'])}",
        f"    in all                   {human(need['total']):>10}",
        "",
    ]
    lines += [f"  MISSING: {line}" for line in found.missing] or ["  nothing is missing"]
    return "\n".join(lines)


def human(count: float) -> str:
    """Bytes in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
