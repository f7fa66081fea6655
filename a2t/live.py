"""What is seen of a running conversation: the dialogue, the residents against the budget, the time of each unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from a2t.kv.kinds import Kind

if TYPE_CHECKING:
    from a2t.duplex.conversation import UnitStats  # torch comes with it, which `a2t top` has no use for

Speaker = Literal["hears", "says"]
LINE_TOKENS = 40
"""A line of dialogue that grows longer is printed and a new one begun."""

SHOWN: dict[str, tuple[tuple[Kind, ...], str]] = {
    "prompt": ((Kind.PREFIX,), "blue"),
    "heard text": ((Kind.TRANSCRIPT,), "green"),
    "said text": ((Kind.RESPONSE,), "magenta"),
    "audio": ((Kind.AUDIO,), "yellow"),
    "structure": ((Kind.MARKER, Kind.DECISION, Kind.ASR, Kind.TERMINATOR), "bright_black"),
}
"""Groups of kinds as shown, in the order of the bar: what stays first, what may be evicted after it."""


def grouped(residents: Mapping[Kind, int]) -> dict[str, int]:
    """Positions by the groups of `SHOWN`."""
    return {name: sum(residents.get(kind, 0) for kind in kinds) for name, (kinds, _) in SHOWN.items()}


def clock(seconds: float) -> str:
    return f"{int(seconds) // 3600:d}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def size(count: int) -> str:
    """Bytes as people read them."""
    return (
        f"{count / 1e3:.0f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
    )


@dataclass
class Line:
    """A run of one side's words. `unit` is the second in which it began."""

    speaker: Speaker
    unit: int
    last_unit: int
    ids: list[int] = field(default_factory=list)


class Dialogue:
    """Puts the words of successive units together into lines."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._open: list[Line] = []

    def add(self, unit: int, heard_ids: Sequence[int], said_ids: Sequence[int], end_of_turn: bool) -> list[Line]:
        """Takes one unit's tokens; returns the lines that are complete now."""
        self._append("hears", unit, heard_ids)
        self._append("says", unit, said_ids)
        return self._close(
            lambda line: (
                line.last_unit < unit or len(line.ids) >= LINE_TOKENS or (end_of_turn and line.speaker == "says")
            )
        )

    def finish(self) -> list[Line]:
        return self._close(lambda line: True)

    @property
    def current(self) -> Sequence[Line]:
        return self._open

    def text(self, line: Line) -> str:
        return " ".join(self._decode(line.ids).split())

    def _append(self, speaker: Speaker, unit: int, ids: Sequence[int]) -> None:
        if not ids:
            return
        line = next((line for line in self._open if line.speaker == speaker), None)
        if line is None:
            line = Line(speaker, unit, unit)
            self._open.append(line)
        line.ids += ids
        line.last_unit = unit

    def _close(self, closes: Callable[[Line], bool]) -> list[Line]:
        done = [line for line in self._open if closes(line)]
        self._open = [line for line in self._open if not closes(line)]
        return done


@dataclass
class Totals:
    """Figures of a conversation so far."""

    units: int = 0
    speaking_units: int = 0
    residents: int = 0
    peak: int = 0
    evicted: int = 0
    missed: int = 0
    encoder_bytes: int = 0
    kv_bytes: int = 0
    unit_ms: list[float] = field(default_factory=list)

    def add(self, listening: bool, stats: UnitStats) -> None:
        self.units += 1
        self.speaking_units += not listening
        self.residents, self.peak = stats.total_residents, stats.peak
        self.evicted += stats.evicted
        self.missed += stats.deadline_missed
        self.encoder_bytes, self.kv_bytes = stats.encoder_bytes, stats.kv_bytes
        self.unit_ms.append(stats.unit_ms)

    def summary(self) -> dict[str, Any]:
        """Flat JSON values. Times are null before the first unit."""
        times = np.asarray(self.unit_ms)
        return {
            "units": self.units,
            "speaking_units": self.speaking_units,
            "peak_residents": self.peak,
            "final_residents": self.residents,
            "evicted": self.evicted,
            "kv_bytes": self.kv_bytes,
            "encoder_bytes": self.encoder_bytes,
            "unit_ms_mean": float(times.mean()) if len(times) else None,
            "unit_ms_p99": float(np.percentile(times, 99)) if len(times) else None,
            "unit_ms_max": float(times.max()) if len(times) else None,
            "deadline_misses": self.missed,
        }


def summary_table(totals: Totals, budget: int | None, policy: str) -> Table:
    s = totals.summary()
    table = Table(title="summary", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("audio", clock(s["units"]))
    table.add_row("units spoken in", str(s["speaking_units"]))
    table.add_row(f"residents at the end (policy {policy})", f"{s['final_residents']:,}")
    table.add_row(
        "residents at the peak", f"{s['peak_residents']:,}" + (f" of {budget:,}" if budget is not None else "")
    )
    table.add_row("positions evicted", f"{s['evicted']:,}")
    table.add_row("KV cache, audio encoder's cache", f"{size(s['kv_bytes'])}, {size(s['encoder_bytes'])}")
    if s["unit_ms_mean"] is not None:
        times = f"{s['unit_ms_mean']:.0f} / {s['unit_ms_p99']:.0f} / {s['unit_ms_max']:.0f} ms"
        table.add_row("unit time, mean / p99 / max", times)
    table.add_row("units over the deadline", str(s["deadline_misses"]))
    return table


@dataclass
class LiveView:
    """The part of the screen that is redrawn. Set the fields; rich asks for it again and again."""

    dialogue: Dialogue
    totals: Totals
    budget: int | None
    seconds: float  # of the whole file
    groups: dict[str, int] = field(default_factory=dict)
    listening: bool = True

    def __rich__(self) -> RenderableType:
        t = self.totals
        head = Text.assemble(
            (clock(t.units), "bold"),
            f" of {clock(self.seconds)}   ",
            ("listening", "green") if self.listening else ("speaking", "magenta"),
        )
        if t.unit_ms:
            recent = t.unit_ms[-1]
            head.append(f"   unit {recent:.0f} ms, mean {np.mean(t.unit_ms):.0f} ms, {t.missed} over the deadline")
        lines = [line_text(line, self.dialogue.text(line)) for line in self.dialogue.current]
        return Group(*lines, head, self._bar(60), self._legend())

    def _bar(self, width: int) -> Text:
        """Residents, one colour a group. The bar's whole width is the budget, or the residents where they exceed it."""
        total = sum(self.groups.values())
        scale = width / max(total, self.budget or 0, 1)
        bar, drawn, seen = Text(), 0, 0
        for name, count in self.groups.items():
            seen += count
            cells = round(seen * scale) - drawn
            bar.append("█" * cells, SHOWN[name][1])
            drawn += cells
        bar.append("·" * (width - drawn), "bright_black")
        if self.budget is not None and total > self.budget:
            bar.append(f" {total - self.budget:,} over", "red")
        return bar

    def _legend(self) -> Text:
        text = Text.assemble((f"{sum(self.groups.values()):,}", "bold"), " residents")
        text.append(f" of {self.budget:,}" if self.budget is not None else ", no budget")
        for name, count in self.groups.items():
            text.append("  █ ", SHOWN[name][1])
            text.append(f"{name} {count:,}")
        return text


def line_text(line: Line, text: str) -> Text:
    style = "green" if line.speaker == "hears" else "magenta"
    return Text.assemble((f"{clock(line.unit)} ", "bright_black"), (f"{line.speaker:>5}  ", style), text)
