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
from pathlib import PurePath
from typing import Any

from a2t.distill.place import Place, absolute
from a2t.distill.recorded import parts_of, report_of
from a2t.distill.recording import Report
from jobs._training import add_arguments, config_of, fit, load_base, parse, progress_bar


def work(job: dict[str, Any]) -> None:
    """One worker: its share of the parts to record, then its share of the shards to store."""
    import torch
    from ray import train

    from a2t.data.manifest import Manifest
    from a2t.distill.corpus import Joined
    from a2t.distill.optimizer import sum_over_workers, world
    from a2t.distill.place import Place
    from a2t.distill.recorded import RecordPlan
    from a2t.distill.recording import known_rows
    from a2t.distill.teacher import StorePlan, model_hash, write_store
    from a2t.duplex.protocol import SpecialTokens

    torch.set_num_threads(job["threads"])
    rank, workers = world()

    def together() -> None:
        sum_over_workers([0.0])

    config = config_of(job["settings"])
    out = Place(job["out"])
    model, language = load_base(job["model"], job["gpu"])
    tokens = SpecialTokens.from_lookup(model.tokenizer.token_id)
    named = model_hash(language, tokens)

    rows = Manifest.read(job["manifest"], job["split"])
    rows, others = known_rows(rows, model.tokenizer.encode, job["leave_out_unknown"])
    if others and rank == 0:
        print(others, flush=True)
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
        source = {"manifest": PurePath(job["manifest"]).name, "split": job["split"], "native": job["native"]}
        store.finish(vocab=model.shape.vocab, **source)
    train.report({"done": 1})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.precompute_teacher",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--manifest", help="audio, words with times (a2t/data/manifest.py): a path or URI")
    parser.add_argument("--split", help="only rows of this split")
    parser.add_argument(
        "--leave-out-unknown", action="store_true", help="go on without rows whose words the model does not know"
    )
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
    try:
        args.manifest, args.out = absolute(args.manifest), absolute(args.out)
        if not Place(args.manifest).is_file():
            raise ValueError(f"{args.manifest}: there is no such manifest")
    except ValueError as error:
        parser.error(str(error))
    print("precompute_teacher: the same command goes on where this one stopped", flush=True)
    if not fit(work, args, name="precompute_teacher", storage=f"{args.out}/ray"):
        return 1
    summary(Place(args.out))
    return 0


TOP_K = 128
"""Of how many tokens the usual truncated store keeps the probability: 4 bytes of id and 2 of value each."""


def summary(out: Place) -> None:
    """What is in the store, beside the other ways to keep what a teacher said."""
    reports = [report_of(part) for part in parts_of(out / "corpus")]
    print(f"corpus: {sum(reports, Report())}")
    manifest = json.loads((out / "teacher" / "manifest.json").text())
    events, size, width = manifest["events"], manifest["bytes"], manifest["provenance"]["vocab"]
    print(f"teacher: {events} native events in {size / 2**20:.1f} MiB, {size / events:.0f} bytes an event, exact")
    print(
        f"  full distributions in bfloat16 would take {2 * width} bytes an event, the best {TOP_K} of each {TOP_K * 6}"
    )


if __name__ == "__main__":
    sys.exit(main())
