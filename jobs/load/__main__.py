"""`python -m jobs.load --clients 4 --minutes 10 --realtime [--address http://HOST:8000] [--out out/load]`

That many real clients over real sockets (the unmodified `openbmb-realtime`), each in a conversation of its own with
the endpoint: units over their second, unit time and end-to-end latency, the memory of each conversation.  Without an
address Ray and the endpoint are started on this machine.

`--churn SESSIONS` opens and closes so many short conversations one after the other, `--clients` at a time, and tells
what they leave behind: rows, sessions, actors, memory.  The out folder gets results.json and a picture.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console

from jobs.demo.call import RATE, Trouble
from jobs.demo.endpoint import Endpoint
from jobs.demo.script import script
from jobs.load.churn import churn
from jobs.load.clients import converse_all
from jobs.load.report import report_churn, report_load

NAME = "a2t-embedded"
POSITIONS_PER_S = 24  # without eviction, and room to spare
SPOKEN_MINUTES = 1.0
"""One such conversation is rendered; each client speaks it over and over, from a point of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return load(args)
    except (ValueError, OSError, Trouble) as error:
        print(f"load: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nload: interrupted", file=sys.stderr)
        return 130


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.load", description="Many clients at once over the served endpoint."
    )
    parser.add_argument("--clients", type=int, default=4, help="conversations at a time (4)")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of each (10)")
    parser.add_argument("--realtime", action="store_true", help="a second of audio each second, as people speak")
    parser.add_argument("--churn", type=int, metavar="SESSIONS", help="open and close so many short ones instead")
    parser.add_argument("--budget", type=int, default=4000, help="most resident positions (4000)")
    parser.add_argument("--seed", type=int, default=0, help="of what is spoken (0)")
    parser.add_argument("--address", help="of an endpoint that runs already (http://HOST:8000)")
    parser.add_argument("--name", default=NAME, help=f"of the model there ({NAME})")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="another model than the embedded default")
    parser.add_argument("--out", type=Path, default=Path("out/load"), help="where results.json and the picture go")
    args = parser.parse_args(argv)
    if args.clients < 1:
        parser.error(f"--clients {args.clients} is below 1")
    if not 0.05 <= args.minutes <= 24 * 60:
        parser.error(f"--minutes {args.minutes:g} is not between 0.05 (three seconds) and a day")
    if args.churn is not None and args.churn < 1:
        parser.error(f"--churn {args.churn} is below 1")
    if args.budget < 0:
        parser.error(f"--budget {args.budget} is below 0; 0 keeps as little as possible")
    return args


def load(args: argparse.Namespace) -> int:
    console = Console(highlight=False, soft_wrap=True)
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        pcm_S = noise(args.seed) if args.churn else script(args.out, SPOKEN_MINUTES, args.seed)[1]
        address = args.address
        if address is None:
            console.print("load: starting Ray on this machine and deploying the endpoint")
            capacity = args.budget + 2048 if args.budget < 10**5 else 2048 + round(args.minutes * 60 * POSITIONS_PER_S)
            endpoint = Endpoint(args.name, args.model, rows=args.clients, capacity=capacity)
            address = stack.enter_context(endpoint)
        if args.churn:
            result = asyncio.run(churn(address, args, pcm_S, console.print))
            return report_churn(console, args.out, result)
        pace = "in real time" if args.realtime else "as fast as results come back"
        console.print(f"load: {args.clients} conversations of {args.minutes:g} minutes at {address}, {pace}")
        talks = asyncio.run(converse_all(address, args, pcm_S, console.print))
    return report_load(console, args.out, args, talks)


def noise(seed: int) -> np.ndarray:
    """A few seconds of it: enough to open a conversation for."""
    return (0.01 * np.random.default_rng(seed).standard_normal(4 * RATE)).astype(np.float32)


if __name__ == "__main__":
    sys.exit(main())
