"""`a2t top`: the conversations and engines of an endpoint, from the metrics that its nodes export for Prometheus.

It reads the same text as Prometheus does, from the nodes themselves, and needs neither Prometheus nor Grafana.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from a2t.kv.kinds import Kind
from a2t.live import SHOWN, clock, grouped, size

PREFIX = "ray_a2t_"
FLEET = {"ray_serve_autoscaling_desired_replicas": "wanted", "ray_serve_deployment_replica_healthy": "running"}
BAR = 24
DISCOVERY = "prom_metrics_service_discovery.json"
TIMEOUT_S = 20.0  # a node with many processes behind it, on a busy machine, takes its time
WIDE = 160
FIRST_TO_GO = {"free", "forwards", "at work", "memory", "by kind", "encoder", "actor", "unit ms", "behind"}
"""Columns for which a narrow terminal has no room."""

Row = dict[str, str | Text]


@dataclass
class Session:
    values: dict[str, float] = field(default_factory=dict)
    residents: dict[Kind, int] = field(default_factory=dict)
    kv_bytes: float = 0.0
    state: str = ""


@dataclass
class Engine:
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[float, float] = field(default_factory=dict)  # units that took at most so many ms, ever


@dataclass
class Snapshot:
    """What the nodes said at one moment."""

    sessions: dict[str, Session] = field(default_factory=lambda: defaultdict(Session))
    engines: dict[str, Engine] = field(default_factory=lambda: defaultdict(Engine))
    fleet: dict[str, float] = field(default_factory=dict)  # engines that Serve wants, if it scales them, and has

    def read(self, text: str) -> None:
        """Takes one node's metrics, in Prometheus' text format."""
        for family in text_string_to_metric_families(text):
            if (word := FLEET.get(family.name)) is not None:
                self._fleet(word, [s.value for s in family.samples if s.labels.get("deployment") == "engine"])
            if not family.name.startswith(PREFIX):
                continue
            for sample in family.samples:
                labels, value, name = sample.labels, float(sample.value), sample.name.removeprefix(PREFIX)
                if (session := labels.get("session")) is not None:
                    self._session(self.sessions[session], name.removeprefix("session_"), labels, value)
                elif (engine := labels.get("engine")) is not None:
                    _engine(self.engines[engine], name.removeprefix("engine_"), labels, value)

    def _fleet(self, word: str, values: Sequence[float]) -> None:
        if values:
            self.fleet[word] = self.fleet.get(word, 0.0) + sum(values)

    @staticmethod
    def _session(session: Session, name: str, labels: Mapping[str, str], value: float) -> None:
        if name == "residents":
            session.residents[Kind[labels["kind"].upper()]] = round(value)
        elif name == "kv_bytes":
            session.kv_bytes += value
        elif name == "state":
            session.state = labels["state"] if value else session.state
        else:
            session.values[name] = value


def _engine(engine: Engine, name: str, labels: Mapping[str, str], value: float) -> None:
    if name == "unit_time_ms_bucket":
        engine.buckets[float(labels["le"])] = value
    else:
        engine.values[name] = value


def quantile(q: float, now: Mapping[float, float], before: Mapping[float, float]) -> float | None:
    """Of what came between two readings of a histogram's cumulative buckets (upper bound -> count), in Prometheus'
    way: within a bucket values are taken as evenly spread. None if nothing came."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in sorted(now.items())}
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    low_bound = low_count = 0.0
    for bound, count in counts.items():
        if count >= q * total:
            if math.isinf(bound):
                return low_bound
            return low_bound + (bound - low_bound) * (q * total - low_count) / max(count - low_count, 1e-9)
        low_bound, low_count = bound, count
    raise AssertionError("the last bucket of a histogram holds everything")


def addresses(given: Iterable[str]) -> list[str]:
    """host:port of every node's metrics. `given`: such addresses, or discovery files as Ray's dashboard writes them;
    none: the Ray cluster that runs on this machine. Raises ValueError if there is nothing to read."""
    found = [a for one in given for a in (_listed(Path(one)) if Path(one).is_file() else [one])]
    if found:
        return found
    session = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "session_latest"
    if (session / DISCOVERY).is_file():
        return _listed(session / DISCOVERY)
    # a cluster without a dashboard: its nodes on this machine leave their ports in files of their own
    ports = sorted(int(p.read_text()) for p in session.glob("metrics_export_port_*"))
    if not ports:
        raise ValueError("no Ray runs on this machine; give the address of a node's metrics, as 10.0.0.5:8080")
    return [f"127.0.0.1:{port}" for port in ports]


def _listed(path: Path) -> list[str]:
    try:
        return [str(target) for group in json.loads(path.read_text()) for target in group["targets"]]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no list of targets as Ray's dashboard writes it ({DISCOVERY})") from None


def scrape(nodes: Iterable[str]) -> tuple[Snapshot, list[str]]:
    """What the nodes say, and those that say nothing."""
    nodes, snapshot, silent = list(nodes), Snapshot(), []
    with ThreadPoolExecutor(min(16, len(nodes))) as pool:
        for node, text in zip(nodes, pool.map(_get, nodes), strict=True):
            if text is None:
                silent.append(node)
            else:
                snapshot.read(text)
    return snapshot, silent


def _get(node: str) -> str | None:
    url = node if "://" in node else f"http://{node}/metrics"
    try:
        return httpx.get(url, timeout=TIMEOUT_S).raise_for_status().text
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


def view(now: Snapshot, before: Snapshot | None = None, width: int = 200) -> RenderableType:
    """Both tables, as much of them as fits. Unit times are those since `before`, where anything came since."""
    if not now.engines and not now.sessions:
        return Text("No engine has said anything yet: its first figures come about ten seconds after it has started.")
    engines = [_engine_row(name, engine, before) for name, engine in sorted(now.engines.items())]
    sessions = [_session_row(name, session) for name, session in sorted(now.sessions.items())]
    legend = Text("conversations   ", style="bold")
    for name, (_, style) in SHOWN.items():
        legend.append("█ ", style).append(f"{name}  ", "not bold")
    fleet = ", ".join(f"{count:,.0f} {word}" for word, count in sorted(now.fleet.items(), reverse=True))
    title = Text("engines   ", style="bold").append(fleet, "not bold")
    return Group(_table(title, engines, width), Text(), _table(legend, sessions, width))


def _engine_row(name: str, engine: Engine, before: Snapshot | None) -> Row:
    v = engine.values
    old = before.engines[name].buckets if before is not None and name in before.engines else {}
    times = [quantile(q, engine.buckets, old) or quantile(q, engine.buckets, {}) for q in (0.5, 0.99)]
    failed = v.get("failed_restores", 0.0)
    return {
        "engine": name.removeprefix("engine/"),
        "rows": _number(v.get("rows")),
        "free": _number(v.get("rows_free")),
        "batch": _number(v.get("batch_size"), 1),
        "step ms": _number(v.get("step_ms"), 1),
        "unit p50 / p99 ms": " / ".join(_number(t) for t in times),
        "forwards": _number(v.get("forwards_per_unit"), 1),
        "at work": "–" if "busy_share" not in v else f"{v['busy_share']:.0%}",
        "misses": _number(v.get("missed_units_total", 0.0)),
        "memory": size(round(v.get("host_uss_bytes", 0.0))),
        "restores": _number(v.get("restores")) + (f", {failed:,.0f} failed" if failed else ""),
    }


def _session_row(name: str, session: Session) -> Row:
    v, groups = session.values, grouped(session.residents)
    total = sum(groups.values())
    return {
        "conversation": name.removeprefix("sess_")[:12],
        "state": session.state,
        "time": clock(v.get("units", 0.0)),
        "residents": _number(total),
        "of": _number(v.get("budget")),
        "by kind": _bar(groups, max(total, v.get("budget", 0.0))),
        "evicted": _number(v.get("evicted")),
        "KV": size(round(session.kv_bytes)),
        "encoder": size(round(v.get("encoder_bytes", 0.0))),
        "actor": size(round(v.get("host_uss_bytes", 0.0))),
        "unit ms": _number(v.get("unit_ms")),
        "behind": "–" if "backlog_s" not in v else f"{v['backlog_s']:.1f} s",
        "misses": _number(v.get("deadline_misses")),
    }


def _table(title: Text, rows: Sequence[Row], width: int) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    columns = [c for c in (rows[0] if rows else {}) if width >= WIDE or c not in FIRST_TO_GO]
    for column in columns:
        words = column in ("engine", "conversation", "state", "by kind")
        table.add_column(column, justify="left" if words else "right", header_style="bright_black", no_wrap=True)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _bar(groups: Mapping[str, int], whole: float) -> Text:
    """One colour a group; the whole width is the budget, or the residents where they exceed it."""
    bar, drawn, seen = Text(), 0, 0
    for name, count in groups.items():
        seen += count
        cells = round(seen * BAR / max(whole, 1)) - drawn
        bar.append("█" * cells, SHOWN[name][1])
        drawn += cells
    return bar.append("·" * (BAR - drawn), "bright_black")


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def run(args: argparse.Namespace) -> int:
    """Raises ValueError if no node answers."""
    console = Console()
    before: Snapshot | None = None
    with Live(console=console, screen=not args.once and console.is_terminal, auto_refresh=False) as live:
        while True:
            nodes = addresses(args.address)  # nodes come and go
            now, silent = scrape(nodes)
            if len(silent) == len(nodes):
                raise ValueError(f"nothing answers at {', '.join(silent)}: is it a node's metrics port?")
            note = [Text(f"no answer from {', '.join(silent)}", "red")] if silent else []
            live.update(Group(view(now, before, console.width), *note), refresh=True)
            if args.once:
                return 0
            before = now
            time.sleep(args.every)
