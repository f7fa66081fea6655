"""Figures as a file for programs, a table for people, and plots.

`results.json` holds the flat figures; `details.json` counts behind them; `report.md` the table with each bar and
whether it was met; the plots show residency over a conversation, word errors by minute and recall by distance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display where evaluations run
import matplotlib.pyplot as plt
import numpy as np

from a2t.eval.embedded import NORMALISER, RECALL_SECONDS, Figures, Rate
from a2t.eval.streaming import SYSTEMS, SessionRun

Results = Mapping[str, float | int | None]

BUDGET = 4000
ALL_UNITS = 10_039
TIERS = {
    "system prompt": ("prefix",),
    "transcript": ("transcript",),
    "response": ("response",),
    "audio": ("audio",),
    "markers, decisions, ends": ("marker", "decision", "asr", "terminator"),
}
COLOURS = ("#444444", "#1b7837", "#762a83", "#92c5de", "#d9d9d9")


@dataclass(frozen=True)
class Bar:
    """One demand. `met` is None where a figure is missing."""

    figure: str
    value: str
    bar: str
    met: bool | None

    @property
    def verdict(self) -> str:
        return "not run" if self.met is None else "pass" if self.met else "**MISSED**"


def bars(r: Results, largest_unit: int) -> list[Bar]:
    """Every bar of the embedded suite. `largest_unit`: positions of the largest unit that was fed under B = 4,000."""
    out: list[Bar] = []

    def add(figure: str, shown: str, bar: str, values: Sequence[float | int | None], met: Any) -> None:
        if any(v is None for v in values):
            out.append(Bar(figure, "-", bar, None))
        else:
            out.append(Bar(figure, shown.format(*values), bar, bool(met(*values))))

    slack = 1e-9
    wer, unbounded = r["wer"], r["wer_unbounded"]
    add("WER, B = 4,000", "{:.2%}", "at most 8 %", [wer], lambda w: w <= 0.08 + slack)
    add(
        "WER, B = 4,000 against unbounded",
        "{:.2%} / {:.2%}",
        "worse by at most 1 point",
        [wer, unbounded],
        lambda w, u: w - u <= 0.01 + slack,
    )
    add(
        "WER, tenth minute against first",
        "{:.2%} / {:.2%}",
        "worse by at most 2 points",
        [r["wer_last_minute"], r["wer_first_minute"]],
        lambda last, first: last - first <= 0.02 + slack,
    )
    add(
        "peak residents, B = 4,000",
        "{:,}",
        f"at most B + one unit ({BUDGET + largest_unit:,})",
        [r["peak_residents"]],
        lambda p: p <= BUDGET + largest_unit,
    )
    peak = r["peak_residents_unbounded"]
    add("peak residents, unbounded", "{:,}", "over 9,000", [peak], lambda p: p > 9000)
    ours, base, window = r["recall"], r["recall_base"], r["recall_streaming_llm"]
    add("recall beyond 3 minutes, native base", "{:.3f}", "at least 0.8", [base], lambda b: b >= 0.8 - slack)
    add(
        "recall beyond 3 minutes, B = 4,000",
        "{:.3f} ({:.3f} base)",
        "at least 0.9 of the base",
        [ours, base],
        lambda a, b: a >= 0.9 * b - slack,
    )
    add(
        "recall beyond 3 minutes, StreamingLLM",
        "{:.3f} ({:.3f} a2t)",
        "at most half of a2t",
        [window, ours],
        lambda w, a: w <= 0.5 * a + slack,
    )
    for kind, name in (("pause", "in pauses"), ("backchannel", "on back-channels"), ("turn_end", "at turn ends")):
        add(
            f"takeover {name}",
            "{:.3f} ({:.3f} base)",
            "within 0.05 of the base",
            [r[f"takeover_{kind}"], r[f"takeover_{kind}_base"]],
            lambda a, b: abs(a - b) <= 0.05 + slack,
        )
    mean, worst = r["emission_delay_mean_s"], r["emission_delay_max_s"]
    add("word emission delay, mean", "{:.2f} s", "at most 1.2 s", [mean], lambda d: d <= 1.2 + slack)
    add("word emission delay, max", "{:.2f} s", "under 5 s", [worst], lambda d: d < 5)
    add(
        "units over 1 s",
        "{:,} of {:,}",
        f"0 of at least {ALL_UNITS:,}",
        [r["deadline_misses"], r["units"]],
        lambda n, units: n == 0 and units >= ALL_UNITS,
    )
    return out


def markdown(r: Results, systems: Mapping[str, Figures], heading: str) -> str:
    """The bars and, below, each system's figures. `heading` says split, seed and size."""
    lines = ["# Embedded suite", "", heading, ""]
    lines += [f"WER normaliser: `{NORMALISER}`. Recall: facts stated more than {RECALL_SECONDS:.0f} s before.", ""]
    lines += ["| figure | measured | bar | |", "|---|---|---|---|"]
    largest = systems["a2t"].largest_unit if "a2t" in systems else 0
    lines += [f"| {b.figure} | {b.value} | {b.bar} | {b.verdict} |" for b in bars(r, largest)]
    lines += ["", "Counts in brackets. Takeovers: share of pauses / back-channels / turn ends / statements taken.", ""]
    columns = ["system", "WER", "recall > 3 min", "order, live", "order, from text", "pauses", "back-channels"]
    columns += ["turn ends", "statements", "interruptions obeyed", "peak residents", "unit ms mean / p99"]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_row(name, f)) + " |" for name, f in systems.items()]
    lines += ["", "![residents](residency.png)", "![word errors](wer_by_minute.png)", "![recall](recall.png)", ""]
    return "\n".join(lines)


def _row(name: str, f: Figures) -> list[str]:
    t = f.turns
    wer = f"{f.transcript.errors.rate:.2%} ({f.transcript.errors.words:,})" if f.transcript else "-"
    peaks = f"{min(f.peaks):,} to {max(f.peaks):,}" if min(f.peaks) != max(f.peaks) else f"{f.peaks[0]:,}"
    rates = [f.recall, f.order_live, f.order_text, t.pause, t.backchannel, t.turn_end, t.statement, t.stopped]
    label = f"{name}: {SYSTEMS[name].says}" if name in SYSTEMS else name
    return [label, wer, *map(_rate, rates), peaks, f"{f.latency.mean:.1f} / {f.latency.p99:.1f}"]


def _rate(rate: Rate) -> str:
    return "-" if rate.value is None else f"{rate.value:.3f} ({rate.of:,})"


def details(systems: Mapping[str, Figures]) -> dict[str, Any]:
    """Counts behind the figures, by system."""
    out: dict[str, Any] = {}
    for name, f in systems.items():
        t = f.transcript
        out[name] = {
            "sessions": f.sessions,
            "peaks": f.peaks,
            "largest_unit": f.largest_unit,
            "latency_ms": vars(f.latency),
            "segments_cut_by_time": f.cut_by_budget,
            "takeover": {k: vars(v) for k, v in vars(f.turns).items()},
            "recall": vars(f.recall),
            "recall_by_distance": [{"from": a, "to": b, **vars(rate)} for a, b, rate in f.recall_by_distance()],
            "order_live": vars(f.order_live),
            "order_from_text": vars(f.order_text),
            "wer": vars(t.errors) if t else None,
            "wer_by_minute": [vars(m) for m in t.by_minute] if t else None,
        }
    return out


def plot_residency(path: Path, bounded: SessionRun, unbounded: SessionRun, budget: int | None = BUDGET) -> None:
    """Residents by kind over one conversation, without eviction and with it. `path` ends in .png."""
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for ax, run, title in zip(axes, (unbounded, bounded), ("without eviction", "with eviction"), strict=True):
        minutes = np.arange(1, len(run.units) + 1) / 60
        stacks = [[sum(u.residents.get(k, 0) for k in kinds) for u in run.units] for kinds in TIERS.values()]
        ax.stackplot(minutes, stacks, labels=list(TIERS), colors=COLOURS, linewidth=0)
        total = sum(run.units[-1].residents.values())
        ax.set_title(f"{title}: peak {run.peak:,}, at the end {total:,}")
        ax.set_xlabel("minutes of conversation")
        ax.set_xlim(0, minutes[-1])
        ax.spines[["top", "right"]].set_visible(False)
    if budget is not None:
        axes[1].axhline(budget, color="black", linestyle="--", linewidth=1)
        axes[1].text(0.1, budget * 1.03, f"budget {budget:,}", fontsize=9)
    axes[0].set_ylabel("resident KV positions")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].legend(handles[::-1], labels[::-1], loc="upper left", frameon=False)
    _save(fig, path)


def plot_wer_by_minute(path: Path, systems: Mapping[str, Figures]) -> None:
    """Word errors of every system with a side channel, by minute of the conversation."""
    fig, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for name, f in systems.items():
        if f.transcript:
            values = [np.nan if m.value is None else 100 * m.value for m in f.transcript.by_minute]
            ax.plot(range(1, len(values) + 1), values, marker="o", markersize=3, label=_says(name))
    ax.set(xlabel="minute of the conversation", ylabel=f"word error rate, % ({NORMALISER})")
    ax.set_ylim(bottom=0)
    _finish(fig, ax, path)


def plot_recall(path: Path, systems: Mapping[str, Figures]) -> None:
    """Share of right answers by how long ago the fact was stated, with 95 % Wilson intervals."""
    fig, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for n, (name, f) in enumerate(systems.items()):
        found = [(a, b, rate) for a, b, rate in f.recall_by_distance() if rate.of]
        if found:
            x = [(a + b) / 120 + 0.04 * n for a, b, _ in found]
            y = np.array([rate.hits / rate.of for *_, rate in found])
            low, high = np.array([wilson(rate) for *_, rate in found]).T
            ax.errorbar(x, y, [y - low, high - y], marker="o", markersize=3, capsize=2, linewidth=1, label=_says(name))
    ax.axvline(RECALL_SECONDS / 60, color="grey", linestyle=":", linewidth=1)
    ax.set(xlabel="minutes since the fact was stated", ylabel="answered right", ylim=(-0.02, 1.05))
    _finish(fig, ax, path)


def wilson(rate: Rate, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a fraction (Wilson's score); `rate.of` must not be 0."""
    p, n = rate.hits / rate.of, rate.of
    middle, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
    return max(0.0, float(min(low, p))), min(1.0, float(max(high, p)))


def write_report(
    folder: Path,
    results: Results,
    systems: Mapping[str, Figures],
    heading: str,
    example: tuple[SessionRun, SessionRun] | None = None,
) -> str:
    """Writes results.json, details.json, report.md and the plots; returns the Markdown.

    `example`: one session bounded and unbounded, for the residency plot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(dict(results), indent=1) + "\n", encoding="utf-8")
    (folder / "details.json").write_text(json.dumps(details(systems), indent=1) + "\n", encoding="utf-8")
    text = markdown(results, systems, heading)
    (folder / "report.md").write_text(text, encoding="utf-8")
    if example is not None:
        plot_residency(folder / "residency.png", *example)
    plot_wer_by_minute(folder / "wer_by_minute.png", systems)
    plot_recall(folder / "recall.png", systems)
    return text


def _says(name: str) -> str:
    return SYSTEMS[name].says if name in SYSTEMS else name


def _finish(fig: Any, ax: Any, path: Path) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8)
    _save(fig, path)


def _save(fig: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)
    plt.close(fig)
