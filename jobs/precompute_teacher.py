"""Runs the frozen teacher over a corpus, once: `python -m jobs.precompute_teacher --manifest M.jsonl --out DIR`.

Each utterance is streamed as it would be live, and the native tokens that the model fed are recorded with the encoder's
embeddings (DIR/corpus).  Then the teacher's final hidden states at native events are stored (DIR/teacher).  Both are
read by `jobs.distill --data DIR`, which needs the same settings: joined streams are planned in both jobs.  A job that
was stopped goes on where it was when it is started again with the same options.

On a cluster: `ray job submit --working-dir . -- python -m jobs.precompute_teacher`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs._training import add_arguments, config_of, fit, load_base, parse, progress_bar


def work(job: dict[str, Any]) -> None:
    """One worker: its share of the parts to record, then its share of the shards to store."""
    import torch
    import torch.distributed as dist
    from ray import train

    from a2t.data.manifest import Manifest
    from a2t.distill.corpus import Joined
    from a2t.distill.recorded import RecordPlan
    from a2t.distill.teacher import StorePlan, model_hash, write_store
    from a2t.duplex.protocol import SpecialTokens

    torch.set_num_threads(job["threads"])
    rank, workers = train.get_context().get_world_rank(), train.get_context().get_world_size()

    def together() -> None:
        if workers > 1:
            dist.barrier()

    config = config_of(job["settings"])
    out = Path(job["out"])
    model, language = load_base(job["model"], job["gpu"])
    tokens = SpecialTokens.from_lookup(model.tokenizer.token_id)
    named = model_hash(language, tokens)

    rows = Manifest.read(job["manifest"], job["split"])
    dtype = model.shape.dtype
    record = RecordPlan.of(
        out / "corpus", job["manifest"], rows, named, config, job["native"], rows_per_part=job["part_rows"], dtype=dtype
    )
    mine = record.unfinished()[rank::workers]
    together()  # all have seen the same list before anyone writes
    bar = progress_bar(job, sum(map(record.rows_of, mine)), f"recording [{rank}]", rank)
    for part in mine:
        record.write(part, model, at_once=job["at_once"], progress=bar.update)
    bar.close()
    together()
    corpus = Joined(record.open(), config)
    if not len(corpus):
        raise ValueError(f"{job['manifest']}: every row is longer than {config.max_seconds} s (--set max_seconds=...)")

    store = StorePlan(out / "teacher", model.name, named, dtype, tuple(corpus.ids), job["shard_examples"])
    mine = store.unfinished()[rank::workers]
    together()
    bar = progress_bar(job, sum(len(store.indices(s)) for s in mine), f"teacher [{rank}]", rank)
    write_store(store, language, tokens, corpus, mine, progress=bar.update)
    bar.close()
    together()
    if rank == 0:
        source = {"manifest": Path(job["manifest"]).name, "split": job["split"], "native": job["native"]}
        store.finish(vocab=model.shape.vocab, **source)
    train.report({"done": 1})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.precompute_teacher",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--manifest", type=Path, help="JSON lines: audio, words with times (a2t/data/manifest.py)")
    parser.add_argument("--split", help="only rows of this split")
    parser.add_argument(
        "--native",
        choices=["record", "manifest"],
        default="record",
        help="what the model says when it streams (record), or the manifest's own native units",
    )
    parser.add_argument("--at-once", type=int, default=8, help="utterances that a worker streams in one batch")
    parser.add_argument("--part-rows", type=int, default=256, help="rows recorded between two points to go on from")
    parser.add_argument("--shard-examples", type=int, default=64, help="streams stored between two such points")
    args = parse(parser, argv, required=["manifest", "out"])
    if not args.manifest.is_file():
        parser.error(f"{args.manifest}: there is no such manifest")
    args.manifest, args.out = args.manifest.resolve(), str(Path(args.out).resolve())
    if not fit(work, args, name="precompute_teacher", storage=str(Path(args.out) / "ray")):
        return 1
    summary(Path(args.out))
    return 0


def summary(out: Path) -> None:
    """What is in the store, beside the other ways to keep what a teacher said."""
    from a2t.distill.recording import Report

    reports = [json.loads(p.read_text()) for p in sorted((out / "corpus").glob("part-*/report.json"))]
    print(f"corpus: {sum((Report(**r) for r in reports), Report())}")
    manifest = json.loads((out / "teacher" / "manifest.json").read_text())
    events, size, width = manifest["events"], manifest["bytes"], manifest["provenance"]["vocab"]
    print(f"teacher: {events} native events in {size / 2**20:.1f} MiB, {size / events:.0f} bytes an event")
    print(f"  full distributions in bfloat16 would take {2 * width} bytes an event, the best 128 of each {128 * 6}")


if __name__ == "__main__":
    sys.exit(main())
