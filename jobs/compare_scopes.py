"""Where the adapter acts, compared: `python -m jobs.compare_scopes --data DIR --validate HELD.jsonl --out DIR`.

Trains the same adapter in four ways and measures each on held-out rows: as published; (a) LoRA on segment positions
only; (a) with (b), transcripts hidden from native predictions while their audio is resident; without distillation.
Writes comparison.json and comparison.md; started again it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from a2t.distill.place import Place, absolute
from jobs import distill as distill_job
from jobs._training import add_arguments, load_base, parse

VARIANTS: dict[str, tuple[str, list[str]]] = {
    "paper": ("as published: LoRA everywhere", []),
    "segment": ("(a) LoRA on segment positions", ["--set", "scope=segment"]),
    "segment_hidden": (
        "(a) + (b) transcript hidden while its audio is resident",
        ["--set", "scope=segment", "--set", "hide_transcript=true"],
    ),
    "no_distillation": ("transcription loss alone", ["--no-distillation"]),
}
COLUMNS = ("wer", "takeover_pause", "takeover_backchannel", "takeover_turn_end", "kl")


def evaluate(args: argparse.Namespace, adapter: Path | None, settings: Any) -> dict[str, float]:
    """Streamed word errors and takeovers, and the KL from the frozen model at native events, of one adapter; of the
    base itself without one."""
    from a2t.data.manifest import Manifest
    from a2t.eval.validation import tally

    rows = Manifest.read(args.validate)[: args.validate_rows]
    if adapter is None:
        model, _ = load_base(args.model, args.gpu)
        figures = tally(model, args.validate, rows, args.budget, side_channel=False).figures()
        return {k: v for k, v in figures.items() if k not in ("wer", "score")}
    model, _ = load_base(args.model, args.gpu, adapter)
    return {**tally(model, args.validate, rows, args.budget).figures(), "kl": divergence(args, adapter, settings)}


def divergence(args: argparse.Namespace, adapter: Path, settings: Any) -> float:
    """KL(teacher || student), mean over the native events of the held-out rows, transcripts in place."""
    import torch

    from a2t.data.manifest import Manifest
    from a2t.distill.batches import collate, counts_of
    from a2t.distill.recording import record
    from a2t.distill.sequences import pair, view_of
    from a2t.distill.step import Student
    from a2t.duplex.protocol import SpecialTokens
    from a2t.models.adapters import continue_adapter

    model, language = load_base(args.model, args.gpu)
    tokens = SpecialTokens.from_lookup(model.tokenizer.token_id)
    rows = Manifest.read(args.validate)[: args.validate_rows]
    native: Literal["manifest", "record"] = "manifest" if all(row.native is not None for row in rows) else "record"
    pairs = [pair(tokens, e) for e in record(model, args.validate, rows, native, settings.delta, None)]
    student = Student(language, tokens, replace(settings, autocast=None))
    continue_adapter(student.peft, adapter)
    counts = sum((counts_of([p]) for p in pairs[1:]), counts_of(pairs[:1]))
    assert tokens.asr_end is not None
    total = 0.0
    with torch.no_grad():
        for p in pairs:
            view = view_of(p.student, None, settings.hide_transcript, tokens.asr_end)
            total += float(student(collate([p], [view]).to(student.device), counts)[1][1])
    return total


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for found in results.values():
        cells = [f"{found[c]:.3f}" if c in found else "" for c in COLUMNS]
        lines.append(f"| {found['says']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.compare_scopes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--data", help="what jobs.precompute_teacher wrote")
    parser.add_argument("--start-from", help="an earlier adapter that all of them go on from")
    parser.add_argument("--validate", help="manifest of held-out rows, with turns if takeovers are to be measured")
    parser.add_argument("--validate-rows", type=int, help="only so many of them")
    parser.add_argument("--budget", type=int, default=4000, help="the KV budget of the measurement")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="some of them")
    args = parse(parser, argv, required=["data", "out", "validate"])
    args.out, args.validate = absolute(args.out), absolute(args.validate)
    names = args.variants.split(",")
    if unknown := [n for n in names if n not in VARIANTS]:
        parser.error(f"there is no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    passed = passed_on(args, sys.argv[1:] if argv is None else argv)
    out = Path(args.out)
    results: dict[str, dict[str, Any]] = {
        "base": {"says": "the frozen model, without side channel", **evaluate(args, None, args.settings)}
    }
    for name in names:
        says, options = VARIANTS[name]
        print(f"compare_scopes: {says}", flush=True)
        if distill_job.main([*passed, "--out", str(out / name), *options]):
            return 1
        settings = replace(args.settings, scope="segment" if name.startswith("segment") else "everywhere")
        settings = replace(settings, hide_transcript=name == "segment_hidden")
        results[name] = {"says": says, **evaluate(args, out / name / "adapter", settings)}
        (Place(out) / "comparison.json").write_text(json.dumps(results, indent=1) + "\n")
        (Place(out) / "comparison.md").write_text(table(results))
        print(table(results), flush=True)
    return 0


def passed_on(args: argparse.Namespace, argv: Sequence[str]) -> list[str]:
    """The options that are the training job's as well."""
    own = {"--out", "--validate", "--validate-rows", "--budget", "--variants"}
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
            continue
        name, equals, _ = word.partition("=")
        if name in own:
            skip = not equals
        else:
            kept.append(word)
    return kept


if __name__ == "__main__":
    sys.exit(main())
