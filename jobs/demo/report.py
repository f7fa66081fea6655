"""What a person sees of the conversation while it runs, and the figures at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from rich.console import Console
from rich.table import Table

from a2t.data.manifest import Row
from a2t.duplex.conversation import UnitStats
from a2t.eval.embedded import RECALL_SECONDS, Figures, Rate, figures
from a2t.eval.report import plot_residency
from a2t.eval.streaming import SessionRun, UnitRun
from a2t.kv.kinds import Kind
from a2t.live import Dialogue, LiveView, Totals, grouped, line_text
from jobs.demo.call import Talk

RATE = 16_000


class Words:
    """Numbers for words, as the live display wants them: the wire carries text."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
        return [self._ids[word] for word in text.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(self._words[i] for i in ids)


class Screen:
    """Shows `a2t.unit` events: finished lines scroll by, memory and time stay below. On no terminal, a line of figures
    a minute takes their place; `quiet` leaves the dialogue out."""

    def __init__(self, console: Console, seconds: float, budget: int | None, quiet: bool = False):
        self._console, self._quiet = console, quiet
        self._words, self._totals = Words(), Totals()
        self._dialogue = Dialogue(self._words.decode)
        # open lines are shown below on a terminal only: printed into a log, they would stand there twice
        below = self._dialogue if console.is_terminal else Dialogue(self._words.decode)
        self.view = LiveView(below, self._totals, budget, seconds)

    def show(self, event: dict[str, Any]) -> None:
        stats = unit_stats(event)
        self._totals.add(event["listening"], stats)
        self.view.groups, self.view.listening = grouped(stats.residents), event["listening"]
        if not self._quiet:
            heard, said = self._words.encode(event["transcript"]), self._words.encode(event["response"])
            for line in self._dialogue.add(event["unit"], heard, said, event["end_of_turn"]):
                self._console.print(line_text(line, self._dialogue.text(line)))
        if not self._console.is_terminal and (event["unit"] + 1) % 60 == 0:
            self._console.print(self.view)

    def finish(self) -> None:
        for line in self._dialogue.finish():
            self._console.print(line_text(line, self._dialogue.text(line)))


def unit_stats(event: dict[str, Any]) -> UnitStats:
    return UnitStats(
        unit=event["unit"],
        residents={Kind[name.upper()]: count for name, count in event["residents"].items()},
        peak=event["peak"],
        evicted=event["evicted"],
        evicted_units=(),
        unit_ms=event["unit_ms"],
        wait_ms=0.0,
        forwards=event["forwards"],
        encoder_bytes=event["encoder_bytes"],
        kv_bytes=event["kv_bytes"],
        deadline_missed=event["missed"],
    )


def session_run(row: Row, talk: Talk, system: str) -> SessionRun:
    """As the evaluation keeps what happened."""
    units = [
        UnitRun(
            listening=e["listening"],
            end_of_turn=e["end_of_turn"],
            response=e["response"].strip(),
            transcript=e["transcript"],
            unit_ms=e["unit_ms"],
            positions=e["positions"],
            evicted=e["evicted"],
            residents={kind: n for kind, n in e["residents"].items() if n},
            closed_by=e["segment_closed_by"],
        )
        for e in talk.units
    ]
    return SessionRun(row.id, system, talk.session_id, max(e["peak"] for e in talk.units), units)


def report(
    console: Console, out: Path, budget: int, row: Row, pcm_S: np.ndarray, bounded: Talk, unbounded: Talk
) -> dict[str, Any]:
    """Prints the table; writes results.json, residency.png and conversation.flac into `out`. Returns the figures."""
    runs = [session_run(row, bounded, "a2t"), session_run(row, unbounded, "unbounded")]
    scored = [figures([(row, run)]) for run in runs]
    out.mkdir(parents=True, exist_ok=True)
    plot_residency(out / "residency.png", runs[0], runs[1], budget)
    write_conversation(out / "conversation.flac", pcm_S, bounded)
    results = {
        "minutes": len(runs[0].units) / 60,
        "budget": budget,
        "with_eviction": flat(scored[0], runs[0], bounded),
        "without_eviction": flat(scored[1], runs[1], unbounded),
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print()
    console.print(table(scored, runs, [bounded, unbounded], budget))
    files = "residency.png, results.json and conversation.flac (left the user, right the model)"
    console.print(f"a2t: {files} are in {out}")
    return results


def flat(f: Figures, run: SessionRun, talk: Talk) -> dict[str, Any]:
    assert f.transcript is not None
    everything = Rate.count(r.right for r in f.recalled)
    delays = f.transcript.delays
    return {
        "wer": f.transcript.errors.rate if f.transcript.errors.words else None,
        "recall_right": everything.hits,
        "recall_asked": everything.of,
        "recall_right_after_3_minutes": f.recall.hits,
        "recall_asked_after_3_minutes": f.recall.of,
        "peak_residents": run.peak,
        "final_residents": sum(run.units[-1].residents.values()),
        "unit_ms_mean": f.latency.mean,
        "unit_ms_p99": f.latency.p99,
        "deadline_misses": f.latency.misses,
        "emission_delay_mean_s": float(np.mean(delays)) if delays else None,
        "emission_delay_max_s": max(delays, default=None),
        "units": f.latency.units,
        "seconds_taken": talk.seconds,
    }


def table(scored: list[Figures], runs: list[SessionRun], talks: list[Talk], budget: int) -> Table:
    columns = [flat(*both) for both in zip(scored, runs, talks, strict=True)]
    out = Table(title=f"{len(runs[0].units) / 60:.1f} minutes of conversation", title_justify="left")
    out.add_column("", style="bold")
    out.add_column(f"budget {budget:,}", justify="right")
    out.add_column("no eviction", justify="right")

    def line(name: str, show: Any) -> None:
        out.add_row(name, *(show(c) for c in columns))

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    line("word errors", lambda c: "-" if c["wer"] is None else f"{c['wer']:.1%}")
    line("recall answers right", lambda c: f"{c['recall_right']} of {c['recall_asked']}")
    line(
        f"  told over {RECALL_SECONDS / 60:.0f} min before",
        lambda c: f"{c['recall_right_after_3_minutes']} of {c['recall_asked_after_3_minutes']}",
    )
    line("peak residents", lambda c: f"{c['peak_residents']:,}")
    line("final residents", lambda c: f"{c['final_residents']:,}")
    line("unit time, mean / p99", lambda c: f"{c['unit_ms_mean']:.0f} / {c['unit_ms_p99']:.0f} ms")
    line("deadline misses", lambda c: f"{c['deadline_misses']} of {c['units']:,}")
    line(
        "emission delay, mean / max",
        lambda c: f"{seconds(c['emission_delay_mean_s'])} / {seconds(c['emission_delay_max_s'])}",
    )
    line("took", lambda c: f"{c['seconds_taken']:.0f} s")
    return out


def write_conversation(path: Path, pcm_S: np.ndarray, talk: Talk) -> None:
    """Both voices, stereo at 16 kHz: a unit's answer begins when the unit is over, or when the one before it ends."""
    answers_S = np.zeros(len(pcm_S) + 10 * RATE, np.float32)
    free = 0
    for unit, speech_S in sorted(talk.speech.items()):
        said_S = soxr.resample(speech_S, 24_000, RATE)
        start = max((unit + 1) * RATE, free)
        free = min(start + len(said_S), len(answers_S))
        answers_S[start:free] = said_S[: max(0, free - start)]
    user_S = np.pad(pcm_S, (0, len(answers_S) - len(pcm_S)))
    soundfile.write(path, np.stack([user_S, answers_S], axis=1), RATE)
