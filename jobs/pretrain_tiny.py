"""Makes the embedded default from nothing: corpus, encoder, language model. Resumable; two CPU processes.

python -m jobs.pretrain_tiny --work runs/pretrain --out a2t/models/embedded
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from a2t.data import embedded_corpus
from a2t.pretrain import recipe
from a2t.pretrain.loop import Workers


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.pretrain_tiny", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/pretrain"), help="corpus, checkpoints, log (resumes)")
    parser.add_argument("--out", type=Path, default=Path("a2t/models/embedded"), help="where the finished model goes")
    parser.add_argument("--seed", type=int, default=0, help="of corpus order and weights (default 0)")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each (default 2)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the corpus and of the steps, for a trial run"
    )
    parser.add_argument("--until", choices=recipe.PHASES, default=recipe.PHASES[-1], help="stop after this phase")
    args = parser.parse_args()
    print(f"corpus in {args.work}: rendering what is missing", flush=True)
    embedded_corpus.train(args.work / "train", args.scale, shards=args.workers)
    embedded_corpus.dev(args.work / "dev", shards=args.workers)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(29500 + os.getpid() % 1000))
    mp.spawn(_worker, args=(args,), nprocs=args.workers)
    print(f"made {args.out}; learning curve in {args.work / 'learning_curve.png'}")


def _worker(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    workers = Workers(rank, args.workers)
    if workers.size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=workers.size)
    recipe.run(args.work, args.out, args.seed, args.scale, workers, args.until)
    if workers.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
