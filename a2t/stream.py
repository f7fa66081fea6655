"""`a2t stream`: one audio file through one conversation, without Ray."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live

from a2t.audio.files import audio_info, stream_audio
from a2t.duplex.conversation import CacheFull, Conversation, ConversationConfig, UnitStats
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import Engine, EngineConfig
from a2t.duplex.unit_loop import UnitResult
from a2t.kv.policies import make_policy
from a2t.live import Dialogue, LiveView, Totals, grouped, line_text, summary_table
from a2t.models.base import DuplexModel
from a2t.models.loading import DTYPES, EMBEDDED_NAME, OWN, load_model

QUIET_UNITS = 2
"""Silent units that end the tail: the model has nothing more to say."""


def stream(args: argparse.Namespace) -> int:
    """Returns the exit code. Raises ValueError or OSError with a message for the user."""
    if args.seed is not None and not args.sampled:
        raise ValueError("--seed is for sampling: add --sampled, or leave it out")
    info = audio_info(args.file)
    options = parse_options(args.policy_option)
    make_policy(args.policy, **options)  # a wrong one is said before the model is loaded
    model = load(args.model, args.adapter, args.dtype, args.device)
    if args.policy == "context" and hasattr(model, "context_window"):
        options = model.context_window() | options
    config = ConversationConfig(
        budget=args.budget,
        policy=args.policy,
        policy_options=options,
        duplex=DuplexConfig.of(model, greedy=not args.sampled, seed=args.seed or 0),
        system_prompt=args.prompt,
    )
    tail = int(args.tail or 0)
    engine = Engine(
        model,
        rows=1,
        capacity=capacity_for(config, int(info.seconds) + tail),
        config=EngineConfig(side_channel_budget_s=args.time_budget, scratch_rows=0),
    )
    conversation = engine.open(config)

    out, screen = Console(soft_wrap=True, highlight=False), Console(stderr=True)
    dialogue, totals = Dialogue(model.tokenizer.decode), Totals()
    limit = args.budget if args.policy == "a2t" else None
    view = LiveView(dialogue, totals, limit, info.seconds)
    live = Live(view, console=screen, redirect_stdout=sys.stdout.isatty(), refresh_per_second=4)
    ended: BaseException | None = None
    with live if screen.is_terminal else nullcontext():
        try:
            for result, stats in units(engine, conversation, args.file, tail):
                totals.add(result.listening, stats)
                view.groups, view.listening = grouped(stats.residents), result.listening
                lines = dialogue.add(result.unit, result.transcript_ids, result.response_ids, result.end_of_turn)
                if args.json:
                    print(json.dumps(unit_json(result, stats)), flush=True)
                else:
                    for line in lines:
                        out.print(line_text(line, dialogue.text(line)))
        except (ValueError, CacheFull, KeyboardInterrupt) as error:
            ended = error  # what came before it is shown first
    if args.json:
        print(json.dumps({"summary": {**totals.summary(), "complete": ended is None}}), flush=True)
    else:
        for line in dialogue.finish():
            out.print(line_text(line, dialogue.text(line)))
        out.print(summary_table(totals, limit, args.policy))
    if isinstance(ended, CacheFull):
        raise ValueError(str(ended)) from ended
    if ended is not None:
        raise ended
    return 0


def units(engine: Engine, conversation: Conversation, path: Path, tail: int) -> Iterator[tuple[UnitResult, UnitStats]]:
    """Pushes the file a unit at a time, the last one filled up with silence; then at most `tail` silent units, until
    the model has listened to QUIET_UNITS in a row."""
    samples = engine.model.encoder.samples_per_unit
    quiet = 0
    for pcm_S in stream_audio(path, samples):
        engine.push(conversation, np.pad(pcm_S, (0, samples - len(pcm_S))))
        for _, result, stats in engine.run():
            quiet = quiet + 1 if result.listening else 0
            yield result, stats
    quiet = 0
    for _ in range(tail):
        if quiet >= QUIET_UNITS:
            break
        engine.push(conversation, np.zeros(samples, np.float32))
        for _, result, stats in engine.run():
            quiet = quiet + 1 if result.listening else 0
            yield result, stats


def load(model: str | None, adapter: str | None, dtype: str | None, device: str | None) -> DuplexModel:
    """As the command line names them.  ValueError where something cannot be loaded."""
    chosen = None if adapter == "none" else adapter or OWN
    try:
        return load_model(model, chosen, DTYPES[dtype] if dtype else None, device)
    except (KeyError, TypeError, RuntimeError) as error:  # a kind of damage that no check names
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{model or EMBEDDED_NAME}: not a model that can be loaded ({type(error).__name__}: {reason})"
        ) from error


def capacity_for(config: ConversationConfig, seconds: int) -> int:
    """Positions that a conversation of `seconds` can need. Memory is taken as they fill, so it may be generous."""
    evicts = config.policy != "unbounded" and config.budget is not None
    held = config.budget or 0 if evicts else 0
    return 2048 + held + seconds * (8 if evicts else 24)


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` pairs; a value that reads as JSON is taken as such (5, true), any other as text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"--policy-option {pair}: write NAME=VALUE, as in text_tier=fold")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def unit_json(result: UnitResult, stats: UnitStats) -> dict[str, Any]:
    return {
        "unit": result.unit,
        "listening": result.listening,
        "heard": result.transcript_text,
        "said": result.response_text,
        "end_of_turn": result.end_of_turn,
        "segment_closed_by": result.segment_closed_by,
        "residents": {kind.name.lower(): count for kind, count in stats.residents.items()},
        "total": stats.total_residents,
        "evicted": stats.evicted,
        "unit_ms": round(stats.unit_ms, 3),
        "deadline_missed": stats.deadline_missed,
        "kv_bytes": stats.kv_bytes,
        "encoder_bytes": stats.encoder_bytes,
    }
