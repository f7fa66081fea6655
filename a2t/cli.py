"""The command line: `a2t stream FILE`, `a2t doctor PATH`, `a2t top`.

A user's mistake ends in one line on standard error and exit code 1 (2 where the arguments themselves are wrong), never
in a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

USER_ERROR = 1
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except BrokenPipeError:  # whoever read our output has gone, as in `a2t stream ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or flushing at exit fails once more
        return 0
    except (ValueError, OSError) as error:
        print(f"a2t {args.command}: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"a2t {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="a2t", description="Full-duplex speech that remembers in text.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_stream(commands)
    _add_doctor(commands)
    _add_top(commands)
    return parser


def _add_stream(commands: Any) -> None:
    p = commands.add_parser(
        "stream",
        help="hold a conversation with an audio file",
        description="Streams an audio file (wav, flac, ...; any sample rate, any channels) through a duplex model, "
        "second by second: what it hears, what it answers, what stays in its memory, how long each second takes.",
    )
    p.add_argument("file", type=Path, metavar="FILE", help="the audio file")
    p.add_argument("--budget", type=_positions, default=4000, metavar="N", help="most residents, or none (4000)")
    p.add_argument(
        "--policy",
        default="a2t",
        metavar="P",
        help="what is evicted: a2t, unbounded, streaming_llm, basic, context (a2t)",
    )
    p.add_argument("--policy-option", action="append", default=[], metavar="NAME=VALUE", help="as text_tier=fold")
    p.add_argument("--model", metavar="PATH", help="model folder, or the hub's name of one (the embedded model)")
    p.add_argument("--adapter", metavar="PATH", help="adapter folder, the hub's name of one, or none (the model's own)")
    p.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="of the weights (the checkpoint's own)")
    p.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, or auto for all GPUs (a GPU if there is one)")
    p.add_argument("--prompt", metavar="TEXT", help="system prompt (the model's own)")
    p.add_argument("--sampled", action="store_true", help="sample the answers instead of taking the likeliest token")
    p.add_argument("--seed", type=int, metavar="S", help="of the sampling (0)")
    p.add_argument("--time-budget", type=_seconds, default=0.8, metavar="S", help="time a unit may take before the "
                   "side channel leaves the rest to the next one, or none (0.8)")  # fmt: skip
    p.add_argument("--tail", type=_seconds, default=10.0, metavar="S", help="most silence added at the end so that an "
                   "answer can be finished (10)")  # fmt: skip
    p.add_argument("--json", action="store_true", help="one JSON object a unit on standard output, then the summary")
    p.set_defaults(run=_stream)


def _add_doctor(commands: Any) -> None:
    p = commands.add_parser(
        "doctor",
        help="look into a model folder",
        description="Says what is in a checkpoint, what is missing or damaged (exit code 1) and what it will need in "
        "memory. Loads no weights.",
    )
    p.add_argument("path", metavar="PATH", help="a checkpoint's folder, or the hub's name of one")
    p.add_argument("--conversations", type=_count, default=1, metavar="N", help="held at once (1)")
    p.add_argument("--budget", type=_positions, default=4000, metavar="B", help="most residents of each (4000)")
    p.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="as it would be loaded (its own)")
    p.add_argument("--json", action="store_true", help="one JSON object")
    p.set_defaults(run=_doctor)


def _add_top(commands: Any) -> None:
    p = commands.add_parser(
        "top",
        help="watch the conversations and engines of an endpoint",
        description="Shows what every conversation keeps in memory and how long its seconds take, and how busy the "
        "engines are, from the metrics of the nodes. Ctrl-C ends it.",
    )
    p.add_argument(
        "address",
        nargs="*",
        metavar="ADDRESS",
        help="host:port of a node's metrics, or Ray's prom_metrics_service_discovery.json (the Ray that runs here)",
    )
    p.add_argument("--every", type=_interval, default=5.0, metavar="S", help="seconds between two readings (5)")
    p.add_argument("--once", action="store_true", help="read once, print, end")
    p.set_defaults(run=_top)


def _top(args: argparse.Namespace) -> int:
    from a2t.top import run

    return run(args)


def _doctor(args: argparse.Namespace) -> int:
    from a2t.doctor import run

    return run(args)


def _stream(args: argparse.Namespace) -> int:
    from a2t.stream import stream  # torch is imported here, after the arguments have been read

    return stream(args)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of conversations; give 1 or more")
    return int(text)


def _positions(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of positions; give 0 or more, or none")
    return int(text)


def _interval(text: str) -> float:
    value = _seconds(text)
    if value is None or value < 0.2:
        raise argparse.ArgumentTypeError(f"{text!r} is too often; give 0.2 seconds or more")
    return value


def _seconds(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds, 0 to 3600, or none")
    return value


if __name__ == "__main__":
    sys.exit(main())
