"""Makes a manifest of a corpus: `python -m jobs.prepare --corpus DIR --alignments DIR --out DIR`.

--corpus      LibriSpeech's folders, parquet in the form of openslr/librispeech_asr (or that name itself, with
              --config all), or any folder of audio files with a text file beside each
--alignments  a folder of TextGrids, of condensed .alignment.txt files or of parquet with alignments (or the name
              gilkeyio/librispeech-alignments); left out: aligned here, English only (how exact: jobs.check_aligner)

Each may be a path or a URI such as s3://bucket/folder.  The manifest is OUT/manifest.parquet, and report.json beside it
says what was left out or mended.  A run that was stopped goes on when it is started again with the same options.

On a cluster: `ray job submit --working-dir . -- python -m jobs.prepare ...`, with places that every machine can open.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from a2t.data.places import Place
from a2t.data.prepare import Preparation, out_place, summary


def write_parts(preparation: Preparation, workers: int | None) -> list[str]:
    """The missing parts, on Ray Data; returns what went wrong, by part."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    alone = "RAY_ADDRESS" not in os.environ
    if alone:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nobody else can reach a cluster of one process tree
    import ray

    missing = preparation.missing()
    done = len(preparation.parts) - len(missing)
    print(f"{len(preparation.parts)} parts, {done} of them there already", flush=True)
    if not missing:
        return []
    if not ray.is_initialized():
        options: dict[str, Any] = {"address": "local", "include_dashboard": False} if alone else {}
        ray.init(**options)
    ray.data.DataContext.get_current().enable_progress_bars = False  # it counts tasks; ours counts utterances
    shared = ray.put(preparation)

    def work(row: dict[str, Any]) -> dict[str, Any]:
        here: Preparation = ray.get(shared)
        part = here.parts[row["part"]]
        try:
            here.write(part)
        except ValueError as error:
            return {"utterances": len(part.piece.ids), "error": str(error)}
        return {"utterances": len(part.piece.ids), "error": ""}

    # One block a part: each is told as soon as it is there.
    numbers = ray.data.from_items([{"part": part.number} for part in missing], override_num_blocks=len(missing))
    errors = []
    total = sum(len(part.piece.ids) for part in missing)
    with tqdm(total=total, unit="utterance", desc="preparing", mininterval=0.5 if sys.stderr.isatty() else 20) as bar:
        for told in numbers.map(work, concurrency=workers).iter_rows():
            bar.update(told["utterances"])
            errors += [told["error"]] if told["error"] else []
    return errors


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", required=True, help="folder, URI, or name of a data set of the hub")
    parser.add_argument("--alignments", help="folder, URI, or name of a data set; left out: aligned by pocketsphinx")
    parser.add_argument("--out", required=True, help="folder or URI")
    parser.add_argument("--config", help="only files in a folder of this name, such as the hub's configuration 'all'")
    parser.add_argument("--split", default="train", help="of files whose path does not tell it (default: train)")
    parser.add_argument(
        "--part", type=int, default=512, metavar="N", help="utterances from one resting point to the next"
    )
    parser.add_argument("--workers", type=int, help="parts made at once (default: as many as Ray has cores)")
    args = parser.parse_args(argv)
    if args.part < 1 or (args.workers is not None and args.workers < 1):
        parser.error("--part and --workers are at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        print("looking what is there ...", flush=True)
        alignments = Place.of(args.alignments) if args.alignments else None
        corpus, out = Place.of(args.corpus, args.config), out_place(args.out)
        preparation = Preparation.plan(corpus, alignments, out, args.split, args.part)
        if errors := write_parts(preparation, args.workers):
            raise ValueError("\n".join(sorted(set(errors))))
        report = preparation.finish()
    except ValueError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    print(*summary(report), sep="\n")
    print(f"written to {preparation.manifest}; report.json lies beside it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
