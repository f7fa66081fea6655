"""`a2t doctor PATH`: what is in a checkpoint, what is missing, what it will need in memory.  Loads no weights.

The command's arguments are in a2t.cli.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from a2t.audio.conv_encoder import PER_UNIT
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.protocol import TOKEN_TEXT, SpecialTokens
from a2t.duplex.unit_loop import UnitLoop
from a2t.models import minicpmo, minicpmo_speech, tiny
from a2t.models.adapters import SIDE_CHANNEL
from a2t.models.checkpoint import Checkpoint, read_tokenizer
from a2t.models.hub import locate
from a2t.models.loading import DTYPES, OWN_FOLDER, model_type
from a2t.models.memory import ConversationMemory, on_paper
from a2t.models.whisper_stream import FRAMES

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
    problems: list[str]
    dtype: torch.dtype | None  # of most of them


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
    """Reads headers, configuration and tokenizer.  `dtype`: as it would be loaded, None for its own.  ValueError where
    there is no checkpoint to examine at all."""
    kind = model_type(locate(path, parts=()))
    if kind not in ("minicpmo", tiny.MODEL_TYPE):
        raise ValueError(f"{path} is of model type {kind!r}: a2t runs minicpmo and {tiny.MODEL_TYPE}")
    checkpoint = Checkpoint.open(path, minicpmo.PARTS if kind == "minicpmo" else ("",))
    parts, notes, missing = (_minicpmo if kind == "minicpmo" else _embedded)(checkpoint, dtype)
    missing += [f"{part.prefix} {problem}" for part in parts if part.needed for problem in part.problems[:3]]
    read = [part for part in parts if part.needed]
    loaded = dtype or (torch.float32 if kind == tiny.MODEL_TYPE else parts[0].dtype or torch.bfloat16)
    weights = sum(part.parameters * loaded.itemsize for part in read)
    tokens = SpecialTokens(*range(len(TOKEN_TEXT)))
    room = UnitLoop(tokens, lambda _: "", DuplexConfig()).positions_per_unit(_audio_per_unit(checkpoint))
    return Examination(
        checkpoint.folder, kind, parts, notes, missing, weights, on_paper(checkpoint.config, loaded), room
    )


def _audio_per_unit(checkpoint: Checkpoint) -> int:
    if checkpoint.config["model_type"] == tiny.MODEL_TYPE:
        return PER_UNIT
    return FRAMES // int(checkpoint.config.get("audio_pool_step") or 5)


def _part(
    checkpoint: Checkpoint,
    prefix: str,
    what: str,
    needed: bool = False,
    module: nn.Module | None = None,
    dtype: torch.dtype | None = None,
) -> Part:
    problems: list[str] = []
    try:
        found = checkpoint.describe(prefix)
        if module is not None:
            unused = minicpmo_speech.UNUSED if prefix == minicpmo_speech.PREFIX else frozenset[str]()
            problems = checkpoint.problems(module, prefix, unused, dtype)
    except ValueError as error:  # a file of its is damaged or not there
        found, problems = {}, [str(error)]
    sizes = {name: torch.Size(shape).numel() for name, (shape, _) in found.items()}
    kinds = Counter(kind for _, kind in found.values())
    return Part(
        prefix,
        what,
        tensors=len(checkpoint.names(prefix)),
        parameters=sum(sizes.values()),
        bytes=sum(sizes[name] * kind.itemsize for name, (_, kind) in found.items()),
        dtypes=sorted(str(kind).removeprefix("torch.") for kind in kinds),
        needed=needed,
        problems=problems,
        dtype=kinds.most_common(1)[0][0] if kinds else None,
    )


Findings = tuple[list[Part], list[str], list[str]]


def _minicpmo(checkpoint: Checkpoint, dtype: torch.dtype | None) -> Findings:
    notes, missing = list[str](), list[str]()
    language = minicpmo.language_config(checkpoint)
    with torch.device("meta"):
        llm = Qwen3ForCausalLM(language)
    parts = [_part(checkpoint, minicpmo.LANGUAGE, "language model (Qwen3)", True, llm, dtype)]
    encoder, projection, _ = minicpmo.encoder_modules(checkpoint)
    parts += [
        _part(checkpoint, minicpmo.ENCODER, "audio encoder (Whisper)", True, encoder, dtype),
        _part(checkpoint, minicpmo.PROJECTION, "its projection", True, projection, dtype),
    ]
    voice = minicpmo_speech.PREFIX
    if checkpoint.names(voice):
        parts.append(_part(checkpoint, voice, "speech-token decoder", module=_voice_modules(checkpoint, notes)))
        notes += [f"its voice is incomplete: {problem}" for problem in parts[-1].problems[:1]]
    else:
        notes.append("no tts. tensors: it answers in text, without its own voice")
    known = {name for part in parts for name in checkpoint.names(part.prefix)}
    rest = sorted({name.split(".")[0] for name in checkpoint.files if name not in known})
    parts += [_part(checkpoint, f"{top}.", OTHER_PARTS.get(top, "unknown, not used")) for top in rest]
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


def _voice_modules(checkpoint: Checkpoint, notes: list[str]) -> nn.Module | None:
    try:
        with torch.device("meta"):
            return minicpmo_speech.modules_of(checkpoint)
    except ValueError as error:
        notes.append(f"its voice cannot be used: {error}")
        return None


def _embedded(checkpoint: Checkpoint, dtype: torch.dtype | None) -> Findings:
    with torch.device("meta"):
        modules = tiny.modules_of(checkpoint)
    whole = _part(checkpoint, "", "the embedded model", True, modules, dtype)
    tops = sorted({name.split(".")[0] for name in checkpoint.files})
    parts = [_part(checkpoint, f"{top}.", "part of the embedded model", True) for top in tops]
    missing = [f"it {problem}" for problem in whole.problems[:3]]
    try:
        tiny.WordTokenizer(read_tokenizer(checkpoint.folder))
    except ValueError as error:
        missing.append(str(error))
    adapter = (checkpoint.folder / OWN_FOLDER / "adapter_config.json").is_file()
    return parts, ["it has its own adapter" if adapter else "no adapter: it has no side channel"], missing


def run(args: argparse.Namespace) -> int:
    """0: it can run. 1: something that it needs is missing.  ValueError where there is nothing to look into."""
    if args.budget is None:
        raise ValueError("--budget none: memory without a limit has no size; give a number of positions")
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
            "parts": [{k: v for k, v in asdict(part).items() if k != "dtype"} for part in found.parts],
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
