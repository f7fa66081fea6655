"""What a second of conversation costs.

    python -m jobs.benchmark              Qwen3-8B shapes, random weights, bf16: needs a GPU
    python -m jobs.benchmark --tiny       the same program with tiny sizes on the CPU: shows that it runs
    python -m jobs.benchmark mel          the streaming spectrogram over an hour, beside the whole-buffer form

The first streams ten minutes at a budget of 4,000: one conversation, then the largest number of them that keeps every
unit under a second, beside a plain transformers DynamicCache loop in the same run, and writes OUT/results.json.
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

import numpy as np
import torch
import transformers

from a2t.audio.mel import StreamingMel


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.benchmark", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["language", "mel"], default="language")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--seconds", type=int, metavar="S", help="streamed (600; mel 3600; --tiny 40)")
    parser.add_argument("--budget", type=int, metavar="B", help="most residents (4000; --tiny 300)")
    parser.add_argument("--most", type=int, metavar="N", help="most conversations tried (what memory allows; --tiny 3)")
    parser.add_argument("--out", type=Path, default=Path("out/benchmark"), help="folder of results.json")
    args = parser.parse_args(argv)
    if min(n for n in (args.seconds, args.budget, args.most, 1) if n is not None) < 1:
        parser.error("--seconds, --budget and --most are 1 or more")
    return mel(args.seconds or 3600) if args.what == "mel" else language(args)


def language(args: argparse.Namespace) -> int:
    from a2t.eval import benchmark as b

    if not args.tiny and not torch.cuda.is_available():
        print(
            "benchmark: there is no GPU here (torch.cuda.is_available() is False), and Qwen3-8B in bf16 needs one: "
            "nothing was measured. --tiny runs the same program with tiny sizes on the CPU.",
            file=sys.stderr,
        )
        return 1
    units, budget = args.seconds or (40 if args.tiny else 600), args.budget or (300 if args.tiny else 4000)
    sizes, dtype, device = (b.TINY, torch.float32, "cpu") if args.tiny else (b.MINICPMO_45, torch.bfloat16, "cuda")
    model = b.random_minicpmo(sizes, dtype, device)
    print(f"{sizes.says}; {units} s; {_machine(device)}", flush=True)
    b.arena_run(model, 1, 3, budget)  # warms up

    def fits(conversations: int) -> bool:
        """From the start at a full cache, so that few units show it."""
        run = b.arena_run(model, conversations, b.TRIAL_UNITS, budget, max(1, budget - 200))
        print(f"  {conversations} at once, a trial: the longest unit took {run.unit_ms.max:.0f} ms", flush=True)
        return run.unit_ms.misses == 0

    plain, one = b.plain_run(model, units), b.arena_run(model, 1, units, budget)
    most = args.most or (3 if args.tiny else _rows_that_fit(model, budget))
    count = b.largest(fits, most)
    many = b.arena_run(model, count, units, budget)
    while many.unit_ms.misses and count > 1:
        print(f"  {count} at once over {units} s: {many.unit_ms.misses} units over a second; fewer", flush=True)
        count = max(1, min(count - 1, count * 9 // 10))
        many = b.arena_run(model, count, units, budget)
    runs = [plain, one, many]
    for run in runs:
        t = run.unit_ms
        print(
            f"{run.what:<40} {run.conversations:>4} at once  unit mean {t.mean:7.1f}  p50 {t.p50:7.1f}  "
            f"p99 {t.p99:7.1f} ms  {t.misses} of {t.units} over 1 s  residents {run.residents_peak:>6}  "
            f"peak {'-' if run.peak_bytes is None else f'{run.peak_bytes / 1e9:.1f} GB'}"
        )
    last = [run.minutes_ms[-1] for run in runs]
    print(
        f"the last minute of one conversation: {last[1]:.1f} ms a unit, the plain loop's {last[1] / last[0]:.2f} times"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    results = {
        "command": "python -m jobs.benchmark" + (" --tiny" if args.tiny else ""),
        "sizes": sizes.says,
        "machine": _machine(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": units,
        "budget": budget,
        "dtype": str(dtype).removeprefix("torch."),
        "ratio_to_plain_in_the_last_minute": round(last[1] / last[0], 4),
        "runs": [run.to_json() for run in runs],
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"written: {args.out / 'results.json'}")
    return 0


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _rows_that_fit(model: Any, budget: int) -> int:
    """Conversations that the free memory holds beside a reserve for activations."""
    free, _ = torch.cuda.mem_get_info()
    encoder = model.encoder.new_state().kv_L2HCK.nbytes
    return max(1, int(0.85 * free) // (model.shape.bytes_per_position * (budget + 768) + encoder))


def mel(seconds: int) -> int:
    """A unit's cost at the beginning and at the end, and that of computing the 30 s buffer anew, as the official form
    does."""
    from a2t.audio.mel import SLIDE_AT, log_mel

    second = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
    stream, spent, most = StreamingMel(), [], 0
    for _ in range(seconds):
        stream.push(second)
        start = time.process_time()
        stream.next_unit()
        spent.append(1000 * (time.process_time() - start))
        most = max(most, stream.nbytes)
    part = min(300, max(1, seconds // 2))
    first, last = float(np.median(spent[:part])), float(np.median(spent[-part:]))
    buffer = torch.from_numpy(np.tile(second, SLIDE_AT // len(second)))
    whole = []
    for _ in range(20):
        start = time.process_time()
        log_mel(buffer)
        whole.append(1000 * (time.process_time() - start))
    print(f"streaming log-mel, {seconds} units, CPU time, medians:")
    print(f"  first {part}: {first:.3f} ms a unit; last {part}: {last:.3f} ms; ratio {last / first:.2f}")
    print(f"  the whole 30 s buffer anew: {np.median(whole):.3f} ms, {np.median(whole) / last:.0f} times as much")
    print(f"  bytes held: {most} at most ({StreamingMel.largest_nbytes()} on paper), {stream.nbytes} at the end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
