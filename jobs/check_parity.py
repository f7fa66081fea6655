"""Compares MiniCPM-o as this project runs it with what the official code answered.

    python -m jobs.check_parity FOLDER [FOLDER ..]

Prints the largest difference of each quantity; exit code 1 if one is past its bound, 2 if a folder cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from a2t.eval.parity import check_folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.check_parity", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a folder of the golden files' form")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (1)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    good = True
    for folder in args.folders:
        try:
            report = check_folder(folder)
        except (ValueError, OSError) as error:
            print(f"check_parity: {error}", file=sys.stderr)
            return 2
        print(f"{folder.name}: {'agrees' if report.ok else 'DIFFERS'}")
        print("\n".join(f"  {line}" for line in report.lines()), flush=True)
        good &= report.ok
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
