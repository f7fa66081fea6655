"""Where the adapter acts, compared: `python -m jobs.compare_scopes --out DIR`.

Trains the same adapter in four ways, with the same data, settings and seed, and measures each on held-out sessions: as
published; (a) LoRA on segment positions only; (a) with (b), transcripts hidden from native predictions while their
audio is resident; without distillation.

Without --data and --validate it is about the embedded model, by a short recipe: hours of synthetic utterances, two
thirds of them laid end to end up to a minute, five epochs; then one-minute sessions of unseen voices and sentences.
--set changes the recipe.  Writes results.json and comparison.md; started again it goes on where it stopped, within a
variant too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from a2t.distill.place import Place, absolute
from jobs import distill as distill_job
from jobs import precompute_teacher
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
RECIPE = ["--preset", "embedded-alone", "--set", "epochs=5", "--set", "join_units=60", "--set", "join_share=0.65"]
OWN = ("--out", "--validate", "--validate-rows", "--budget", "--variants", "--hours", "--sessions")
COLUMNS = ("wer", "takeover_pause", "takeover_backchannel", "takeover_turn_end", "kl")


def evaluate(args: argparse.Namespace, adapter: Path | None, settings: Any) -> dict[str, float]:
    """Streamed word errors and takeovers, and the KL from the frozen model at native events, of one adapter; of the
    base itself without one."""
    import torch

    from a2t.data.manifest import Manifest
    from a2t.eval.validation import tally

    torch.set_num_threads(args.threads)
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


def conditions(args: argparse.Namespace, settings: Any) -> dict[str, Any]:
    """What figures depend on, as JSON gives it back."""
    names = ("model", "start_from", "validate", "validate_rows", "budget")
    found = {"settings": asdict(settings), **{name: getattr(args, name) for name in names}}
    return dict(json.loads(json.dumps(found)))


def make_data(args: argparse.Namespace, passed: Sequence[str]) -> bool:
    """The embedded world's utterances with what the frozen model says to them, and held-out sessions."""
    from a2t.data import embedded_corpus

    out = Path(args.out)
    print(f"compare_scopes: {args.hours:g} h of utterances, {args.sessions} held-out sessions", flush=True)
    args.validate = str(embedded_corpus.held_out(out / f"held-{args.sessions}", args.sessions, minutes=1))
    scale = args.hours / embedded_corpus.UTTERANCES.hours
    manifest = embedded_corpus.utterances(out / f"utterances-{args.hours:g}h", scale)
    return not precompute_teacher.main(
        [*passed_on(passed, "--data", "--start-from"), "--manifest", str(manifest), "--out", str(out / "data")]
    )


def options() -> argparse.ArgumentParser:
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
    parser.add_argument("--hours", type=float, default=2.5, help="of utterances, without --data")
    parser.add_argument("--sessions", type=int, default=20, help="held-out sessions of a minute, without --validate")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser, argv = options(), list(sys.argv[1:] if argv is None else argv)
    args = parse(parser, argv, required=["out"])
    if (args.data is None) != (args.validate is None):
        parser.error("--data and --validate go together; without both the embedded model's own are made")
    names = args.variants.split(",")
    if unknown := [n for n in names if n not in VARIANTS]:
        parser.error(f"there is no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    passed = passed_on(argv, *OWN)
    if args.data is None:
        args = parse(parser, [*RECIPE, *argv], required=["out"])
        passed = [*RECIPE, *passed, "--data", str(Path(args.out) / "data")]
        if not make_data(args, passed):
            return 1
    args.out, args.validate = absolute(args.out), absolute(args.validate)
    log = Place(args.out) / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(log.text()) if log.is_file() else {}

    def measured(name: str, says: str, settings: Any, adapter: Path | None) -> None:
        figures = evaluate(args, adapter, settings)
        results[name] = {"says": says, **figures, "under": conditions(args, settings)}
        log.write_text(json.dumps(results, indent=1) + "\n")
        (Place(args.out) / "comparison.md").write_text(table(results))
        print(table(results), flush=True)

    if results.get("base", {}).get("under") != conditions(args, args.settings):
        measured("base", "the frozen model, without side channel", args.settings, None)
    for name in names:
        says, changes = VARIANTS[name]
        settings = distill_job.settings_of(parse(distill_job.options(), [*passed, *changes], required=[]))
        if results.get(name, {}).get("under") == conditions(args, settings):
            continue
        print(f"compare_scopes: {says}", flush=True)
        out = Path(args.out) / name
        if distill_job.main([*passed, "--out", str(out), *changes]):
            return 1
        measured(name, says, settings, out / "adapter")
    print(f"results: {log}, {args.out}/comparison.md")
    return 0


def passed_on(argv: Sequence[str], *own: str) -> list[str]:
    """The options that are another job's as well: `own`, which have a value, are left out."""
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
