"""`python -m jobs.bench_serve --out DIR [--only plain,batch] [--sizes embedded,qwen3-0.6b] [--quick] [--again]`

Measures the engine: against a plain transformers loop, many conversations against one, the 60th minute against the
10th, how many conversations go in real time, and what share of the machine's memory bandwidth is used.  What is
compared is measured in one run.  `results.json` in DIR has the figures of the embedded size at its top and all sizes
under `sizes`; it is written after each section, and sections that it holds already are not run again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from jobs.bench_serve.sections import SECTIONS, Effort, say
from jobs.bench_serve.subject import SIZES

KEYS = (
    "unit_time_ratio_4k",
    "batch16_speedup",
    "hour_over_ten_minutes_time",
    "hour_over_ten_minutes_memory",
    "realtime_conversations",
    "realtime_conversations_unbatched",
    "forwards_listen_unit",
    "forwards_silent_unit",
    "bandwidth_share",
)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    path = args.out / "results.json"
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    saved = json.loads(path.read_text()) if path.is_file() else {}
    sizes: dict[str, Any] = saved.get("sizes", {})
    for size in args.sizes:
        found = sizes.setdefault(size, {})
        kept = [] if args.again else [name for name in found if found[name]["quick"] == args.quick]
        todo = [name for name in args.only if name not in kept]
        if not todo:
            continue
        say(f"{size}: making the model")
        model = SIZES[size]()
        for name in todo:
            begin = time.perf_counter()
            effort = Effort(args.quick, size != "embedded", f"{size} {name}")
            with torch.no_grad():
                values = SECTIONS[name](model, effort)
            found[name] = {**values, "quick": args.quick, "seconds": round(time.perf_counter() - begin, 1)}
            effort.say(json.dumps({k: v for k, v in values.items() if k in KEYS}))
            path.write_text(json.dumps(results(sizes, args.threads), indent=2) + "\n")
    say(f"written to {path}")
    return 0


def results(sizes: dict[str, Any], threads: int) -> dict[str, Any]:
    """The embedded size's figures on top, null where their section has not been run."""
    embedded = {k: v for section in sizes.get("embedded", {}).values() for k, v in section.items()}
    machine = {"processor": platform.machine(), "threads": threads, "torch": torch.__version__}
    return {**{key: embedded.get(key) for key in KEYS}, "machine": machine, "sizes": sizes}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jobs.bench_serve", description="What the engine costs, as ratios.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results.json goes")
    parser.add_argument("--only", type=_names(list(SECTIONS)), default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--sizes", type=_names(list(SIZES)), default=list(SIZES), help=", ".join(SIZES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the tensor library")
    parser.add_argument("--quick", action="store_true", help="a few units of everything: that it works, not how well")
    parser.add_argument("--again", action="store_true", help="also what results.json holds already")
    args = parser.parse_args(argv)
    if args.threads < 1:
        parser.error(f"--threads {args.threads} must be 1 or more")
    return args


def _names(choices: list[str]) -> Any:
    def read(text: str) -> list[str]:
        names = text.split(",")
        if wrong := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(choices)}")
        return names

    return read


if __name__ == "__main__":
    sys.exit(main())
