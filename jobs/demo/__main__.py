"""`python -m jobs.demo [--minutes 10] [--budget 4000] [--seed 0] [--out out/demo] [--keep]`

Starts Ray on this machine, deploys the Serve application with the embedded default and holds a spoken conversation with
it: held-out sentences in a held-out voice, through the stock `openbmb-realtime` client, as fast as the server keeps up.
The same conversation is held twice, within the budget and without eviction, and scored as the evaluation does.  The out
folder gets the figures, a picture of what stayed in memory, and the conversation to listen to.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live

from a2t.data.manifest import Row
from jobs.demo.call import Talk, Trouble, hold
from jobs.demo.endpoint import Endpoint
from jobs.demo.report import Screen, report
from jobs.demo.script import script

NAME = "a2t-embedded"
NO_LIMIT = 10**6


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return demo(args)
    except (ValueError, OSError, Trouble) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.demo", description="A spoken conversation with the embedded model."
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the conversation (10)")
    parser.add_argument("--budget", type=int, default=4000, help="most resident positions (4000)")
    parser.add_argument("--seed", type=int, default=0, help="which held-out conversation (0)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where figures and pictures go (out/demo)")
    parser.add_argument("--port", type=int, help="of the endpoint (8000, or a free one if that is taken)")
    parser.add_argument("--keep", action="store_true", help="leave the endpoint up afterwards, until Ctrl-C")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="another model than the embedded default")
    args = parser.parse_args(argv)
    if not 0.5 <= args.minutes <= 60:
        parser.error(f"--minutes {args.minutes:g} is not between 0.5 and 60")
    if args.budget < 0:
        parser.error(f"--budget {args.budget} is below 0; 0 keeps as little as possible")
    return args


def demo(args: argparse.Namespace) -> int:
    console = Console(highlight=False, soft_wrap=True)
    if args.model is None:
        check_weights()
    console.print(f"a2t: speaking the user's {args.minutes:g} minutes (held-out voice and sentences, seed {args.seed})")
    row, pcm_S = script(args.out, args.minutes, args.seed)
    console.print("a2t: starting Ray on this machine and deploying the endpoint")
    with Endpoint(NAME, args.model, args.port, capacity=capacity(args.minutes)) as address:
        console.print(f"a2t: calling {address} with openbmb-realtime, a budget of {args.budget:,} positions\n")
        bounded = talk(console, address, row, pcm_S, args.budget)
        console.print("\na2t: the same again without eviction, to compare\n")
        unbounded = talk(console, address, row, pcm_S, NO_LIMIT, quiet=True)
        report(console, args.out, args.budget, row, pcm_S, bounded, unbounded)
        if args.keep:
            console.print(f"\na2t: the endpoint stays up; talk to it at {address} (model {NAME}). Ctrl-C ends it")
            with suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)
    return 0


def check_weights() -> None:
    """Says what is missing before anything is started. Raises ValueError."""
    from a2t.models.tiny import ADAPTER, EMBEDDED

    for folder in (EMBEDDED, ADAPTER):
        if not list(folder.glob("*.safetensors")):
            raise ValueError(f"{folder} holds no weights: they come with the repository, see README.md")


def capacity(minutes: float) -> int:
    """Positions that the conversation may take without eviction: some 19 a second, and room to spare."""
    return 2048 + round(minutes * 60 * 24)


def talk(console: Console, address: str, row: Row, pcm_S: np.ndarray, budget: int, quiet: bool = False) -> Talk:
    """Holds the conversation and shows it; `quiet` shows its figures only."""
    screen = Screen(console, row.duration, None if budget == NO_LIMIT else budget, quiet)
    with Live(screen.view, console=console, refresh_per_second=8) if console.is_terminal else nullcontext():
        result = asyncio.run(hold(address, NAME, pcm_S, budget, row.extra.get("prompt"), screen.show))
    screen.finish()
    return result


if __name__ == "__main__":
    sys.exit(main())
