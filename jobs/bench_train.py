"""One distillation step against the plain way, on the same model and the same data: `python -m jobs.bench_train`.

The plain way pads the batch, runs the frozen teacher beside the student and forms all logits of both.  Ours packs,
reads the teacher's stored states and forms logits at events and segments alone, a few rows at a time.  Both compute the
same loss, which is checked.  Every measurement has a fresh process of its own: its first step gives the peak of memory
above what the process held before it, the steps after it the time (median).

The tiny size has the embedded shape, the others those of Qwen3-0.6B and 1.7B with the whole vocabulary (1.7B only
where it is asked for).  Weights are random and utterances are as long as LibriSpeech's: neither changes what is
measured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAYS = ("ours", "plain")


@dataclass(frozen=True)
class Size:
    says: str
    batch: int  # utterances a step
    dtype: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int


SIZES = {
    "tiny": Size("embedded shape, float32", 16, "float32", 182, 256, 6, 4, 2, 64, 768),
    "qwen3": Size("Qwen3-0.6B shape, bfloat16", 4, "bfloat16", 151_748, 1024, 28, 16, 8, 128, 3072),
    "qwen3-1.7b": Size("Qwen3-1.7B shape, bfloat16", 4, "bfloat16", 151_748, 2048, 28, 16, 8, 128, 6144),
}
USUAL = "tiny,qwen3"
MEAN_S, SPREAD_S, LONGEST_S = 12.5, 3.6, 17.0
"""Utterances of LibriSpeech: 460 hours in 132,553, few beyond 17 s."""
TEXT_PER_S = 3
SPEAKING = 0.1


def language(size: Size) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.feed_forward,
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(getattr(torch, size.dtype))
    try:
        return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def pairs_of(size: Size, tokens: Any, seed: int) -> list[Any]:
    """Utterances with words in most units, in some of which the model speaks."""
    import random

    import torch

    from a2t.distill.sequences import Example, pair

    rng = random.Random(seed)
    out = []
    for n in range(size.batch):
        units = max(2, round(min(LONGEST_S, rng.gauss(MEAN_S, SPREAD_S))))
        words = [[rng.randrange(12, size.vocab) for _ in range(TEXT_PER_S)] for _ in range(units)]
        spoken = [tokens.speak, *(rng.randrange(12, size.vocab) for _ in range(3)), tokens.turn_eos, tokens.chunk_eos]
        native = [spoken if rng.random() < SPEAKING else [tokens.listen] for _ in range(units)]
        audio_AD = torch.randn(10 * units, size.hidden, generator=torch.Generator().manual_seed(seed + n))
        out.append(pair(tokens, Example.build(f"e{n}", (12, 13, 14), native, words, audio_AD)))
    return out


def plain_step(student: Any, optimizer: Any, pairs: Sequence[Any], counts: Any) -> tuple[float, int]:
    """Padded batch, live teacher, all logits; the loss, and how many positions were computed."""
    import torch
    import torch.nn.functional as F

    from a2t.distill.batches import Sequences
    from a2t.distill.losses import Shares

    def run(side: str, embed: Any) -> tuple[Any, Any, int]:
        layouts = [getattr(p, side) for p in pairs]
        rows = Sequences.of(layouts, [p.example.audio_AD for p in pairs])
        lengths = [len(x) for x in layouts]
        e_BTD = torch.nn.utils.rnn.pad_sequence(embed(rows).split(lengths), batch_first=True)
        mask_BT = torch.nn.utils.rnn.pad_sequence([torch.ones(n) for n in lengths], batch_first=True).long()
        h_BTD = student.decoder(inputs_embeds=e_BTD, attention_mask=mask_BT, use_cache=False).last_hidden_state
        logits_BTV = student.head(h_BTD.flatten(0, 1)) if side == "student" else base_logits(h_BTD.flatten(0, 1))
        return logits_BTV.view(*h_BTD.shape[:2], -1), layouts, h_BTD.shape[0] * h_BTD.shape[1]

    output_VD = student._output.get_base_layer().weight

    def base_logits(h_ND: Any) -> Any:
        return F.linear(h_ND, output_VD).float()

    def base_embed(rows: Any) -> Any:
        from a2t.distill.teacher import with_audio

        return with_audio(F.embedding(rows.ids_T, student._embedding.get_base_layer().weight), rows)

    with torch.no_grad(), student.peft.disable_adapter():
        taught_BTV, _, positions = run("teacher", base_embed)
        taught_BTV[..., list(student.new_tokens)] = float("-inf")
        p_BTV = taught_BTV.softmax(-1)
    logits_BTV, _, more = run("student", student.embed)
    log_q_BTV = logits_BTV.log_softmax(-1)
    shares = Shares.of(counts)
    loss = torch.zeros(())
    for b, p in enumerate(pairs):
        at = [e.position for e in p.student.events]
        log_q_EV, p_EV = log_q_BTV[b, at], p_BTV[b, [e.position for e in p.teacher.events]]
        loss = loss + shares.event * (torch.xlogy(p_EV, p_EV) - p_EV * log_q_EV).sum()
        weights = torch.tensor([shares.group[g] for g in p.groups])
        fed = torch.tensor([e.token for e in p.student.events])
        loss = loss - (weights * log_q_EV.gather(1, fed[:, None])[:, 0]).sum()
        where, wanted = (torch.tensor(x) for x in zip(*p.targets, strict=True))
        loss = loss - shares.target * log_q_BTV[b, where, wanted].sum()
    loss.backward()
    optimizer.step()
    return float(loss.detach()), positions + more


def measure(size_name: str, way: str, steps: int) -> dict[str, float]:
    """Run in a process of its own."""
    import torch

    from a2t.distill.batches import collate, counts_of, split_step
    from a2t.distill.config import DistillConfig
    from a2t.distill.optimizer import Optimizer
    from a2t.distill.step import Student, train_step
    from a2t.distill.teacher import teach
    from a2t.duplex.protocol import SpecialTokens

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    size = SIZES[size_name]
    tokens = SpecialTokens(*range(1, 12))
    lm = language(size)
    config = DistillConfig(gradient_checkpointing=False, warmup=0.0)
    batches = [pairs_of(size, tokens, 100 * n) for n in range(1 + steps)]
    stored = [[teach(lm, tokens, [p.example])[0].hidden_ED for p in pairs] for pairs in batches]
    event_bytes = sum(t.nbytes for t in stored[0]) + sum(9 * len(t) for t in stored[0])  # with token, unit, group
    events = sum(len(t) for t in stored[0])
    student = Student(lm, tokens, config)
    optimizer = Optimizer(student, student.trainable(), config, 1000)
    if way == "plain":
        student.decoder.set_attn_implementation("sdpa")

    def step(n: int) -> tuple[float, int]:
        pairs, counts = batches[n], counts_of(batches[n])
        if way == "plain":
            return plain_step(student, optimizer, pairs, counts)
        [forwards] = split_step(range(len(pairs)), lambda i: len(pairs[i].student), 1, config.micro_positions)
        made = [
            lambda group=group: (collate([pairs[i] for i in group], None, [stored[n][i] for i in group]), True)
            for group in forwards
        ]
        log = train_step(optimizer, made, counts)
        return log.loss, log.positions

    before = reset_peak()
    loss, positions = step(0)
    peak = peak_bytes() - before
    times = []
    for n in range(1, 1 + steps):
        begun = time.perf_counter()
        step(n)
        times.append(time.perf_counter() - begun)
    return {
        "seconds": statistics.median(times),
        "peak_bytes": peak,
        "held_bytes": before,
        "loss": loss,
        "positions": positions,
        "store_bytes_per_event": event_bytes / events,
    }


def reset_peak() -> int:
    """Starts the kernel's record of this process's peak anew; what it holds now, without freed memory that the
    allocator would use again unseen."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name + ":"))
    return 1024 * int(line.split()[1])


def compare(size: str, steps: int) -> dict[str, Any]:
    found = {}
    for way in WAYS:
        print(f"{size}, {way}: {SIZES[size].says}, {SIZES[size].batch} utterances a step", flush=True)
        argv = [sys.executable, "-m", "jobs.bench_train", "--child", size, way, "--steps", str(steps)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the measurement of {size}, {way} failed:\n{done.stderr[-3000:]}")
        found[way] = json.loads(done.stdout.splitlines()[-1])
    ours, plain = found["ours"], found["plain"]
    if abs(ours["loss"] - plain["loss"]) > 0.02 * abs(plain["loss"]):
        raise RuntimeError(f"{size}: the losses differ ({ours['loss']} and {plain['loss']}): not the same computation")
    return {
        "step_time_ratio": ours["seconds"] / plain["seconds"],
        "peak_memory_ratio": ours["peak_bytes"] / plain["peak_bytes"],
        "store_bytes_per_event": ours["store_bytes_per_event"],
        "full_distribution_bytes_per_event": 2 * SIZES[size].vocab,
        "top_128_bytes_per_event": 128 * 6,
        **found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench_train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench-train"), help="where results.json goes")
    parser.add_argument("--sizes", default=USUAL, help=f"some of {', '.join(SIZES)}")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a measurement")
    parser.add_argument("--child", nargs=2, metavar=("SIZE", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        size, way = args.child
        print(json.dumps(measure(size, way, args.steps)))
        return 0
    names = args.sizes.split(",")
    if unknown := [n for n in names if n not in SIZES]:
        parser.error(f"there is no size {', '.join(unknown)}; there are {', '.join(SIZES)}")
    results: dict[str, Any] = {}
    args.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        found = compare(name, args.steps)
        prefix = "" if name == names[0] else f"{name}_"
        results |= {f"{prefix}{k}": v for k, v in found.items() if k not in WAYS} | {name: found}
        print(
            f"{name}: a step takes {found['step_time_ratio']:.2f} of the plain way's time and "
            f"{found['peak_memory_ratio']:.2f} of its memory; {found['store_bytes_per_event']:.0f} bytes an event "
            f"stored (full distribution {found['full_distribution_bytes_per_event']}, best 128 "
            f"{found['top_128_bytes_per_event']})",
            flush=True,
        )
        (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"results: {args.out / 'results.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
