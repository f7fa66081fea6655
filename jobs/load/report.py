"""What a load run found: results.json, a picture, a table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

from a2t.eval.latency import unit_latency
from jobs.load.churn import Churn
from jobs.load.clients import Talk

matplotlib.use("agg")

from matplotlib import pyplot as plt

MB = 2**20


def report_load(console: Console, out: Path, args: argparse.Namespace, talks: list[Talk]) -> int:
    """The exit status: 1 if a conversation failed."""
    result = summary(args, talks)
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    if any(t.units for t in talks):
        draw(out / "load.png", args, talks)
        table = Table("", "mean", "p50", "p99", "max")
        for name, of in (("unit time, ms", "unit_ms"), ("end to end, ms", "latency_ms")):
            if (times := result[of]) is not None:
                table.add_row(name, *(f"{times[k]:.0f}" for k in ("mean", "p50", "p99", "max")))
        memory = result["memory_per_session"]
        for name, key in (("KV cache, MB", "kv_bytes"), ("encoder, MB", "encoder_bytes"), ("actor, MB", "host_bytes")):
            if (sizes := memory[key]) is not None:
                table.add_row(name, f"{sizes['mean'] / MB:.1f}", "", "", f"{sizes['max'] / MB:.1f}")
        console.print(table)
    console.print(f"{result['misses']} of {result['units']} units over their second; {len(result['troubles'])} failed")
    console.print(f"load: {out / 'results.json'}, {out / 'load.png'}")
    return 1 if result["troubles"] else 0


def summary(args: argparse.Namespace, talks: list[Talk]) -> dict[str, Any]:
    units = [u for t in talks for u in t.units]
    latencies = [ms for t in talks for ms in t.latency_ms]

    def sizes(per_talk: list[list[int]]) -> dict[str, float] | None:
        """Of each conversation the largest; mean and maximum of those."""
        largest = [max(values) for values in per_talk if values]
        return {"mean": float(np.mean(largest)), "max": float(max(largest))} if largest else None

    return {
        "clients": args.clients,
        "minutes": args.minutes,
        "realtime": args.realtime,
        "budget": args.budget,
        "units": len(units),
        "units_expected": args.clients * round(args.minutes * 60),
        "misses": sum(u["missed"] for u in units),
        "unit_ms": asdict(unit_latency(u["unit_ms"] for u in units)) if units else None,
        "latency_ms": asdict(unit_latency(latencies)) if latencies else None,
        "memory_per_session": {
            "residents_peak": max((u["peak"] for u in units), default=0),
            "kv_bytes": sizes([[u["kv_bytes"] for u in t.units] for t in talks]),
            "encoder_bytes": sizes([[u["encoder_bytes"] for u in t.units] for t in talks]),
            "host_bytes": sizes([t.host_bytes for t in talks]),
        },
        "troubles": [t.trouble for t in talks if t.trouble],
    }


def draw(path: Path, args: argparse.Namespace, talks: list[Talk]) -> None:
    figure, (times, memory) = plt.subplots(2, 1, figsize=(9, 6.5), layout="constrained", sharex=True)
    minutes = np.arange(max(len(t.units) for t in talks)) / 60
    for name, per_talk, colour in (
        ("end to end", [t.latency_ms for t in talks], "tab:orange"),
        ("unit", [[u["unit_ms"] for u in t.units] for t in talks], "tab:blue"),
    ):
        rows = np.full((len(talks), len(minutes)), np.nan)
        for row, values in zip(rows, per_talk, strict=True):
            row[: len(values)] = values[: len(minutes)]
        seen = ~np.isnan(rows).all(0)
        times.plot(minutes[seen], np.nanmax(rows[:, seen], 0), color=colour, lw=0.6, alpha=0.5)
        times.plot(minutes[seen], np.nanmedian(rows[:, seen], 0), color=colour, lw=1, label=f"{name}: median, worst")
    times.axhline(1000, color="black", lw=0.8, ls="--", label="one second")
    times.set(ylabel="ms", yscale="log", title=f"{len(talks)} conversations, budget {args.budget:,}")
    times.legend(loc="upper left", fontsize=8)
    for talk in talks:
        memory.plot(minutes[: len(talk.units)], [u["kv_bytes"] / MB for u in talk.units], lw=0.8, alpha=0.7)
    memory.set(ylabel="KV cache of each, MB", xlabel="minutes", ylim=(0, None))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report_churn(console: Console, out: Path, result: Churn) -> int:
    """The exit status: 1 if something is left behind, or a call failed."""
    (out / "churn.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    names = sorted({name for m in result.memory for name in m["bytes"] if "Session" not in name})
    table = Table("process", "after the first tenth, MB", "at the end, MB")
    early = result.memory[len(result.memory) // 10]
    for name in names:
        table.add_row(name, *(f"{m['bytes'].get(name, 0) / MB:.1f}" for m in (early, result.memory[-1])))
    if names:
        console.print(table)
        figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
        for name in names:
            axis.plot(
                [m["sessions"] for m in result.memory],
                [m["bytes"].get(name, 0) / MB for m in result.memory],
                label=name,
            )
        axis.set(xlabel="sessions opened and closed", ylabel="memory of its own, MB", ylim=(0, None))
        axis.legend(fontsize=8)
        figure.savefig(out / "churn.png", dpi=110)
        plt.close(figure)
    still = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in result.left.items())
    console.print(f"{result.sessions} sessions in {result.seconds:.0f} s; still held: {still}")
    for trouble in sorted(set(result.troubles)):
        console.print(f"{result.troubles.count(trouble)} failed: {trouble}")
    return 1 if result.troubles or any(result.left.values()) else 0
