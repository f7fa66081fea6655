"""`a2t top` against the exposition that prometheus_client writes and serves, and its quantiles against numpy's."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from rich.console import Console

from a2t.cli import main
from a2t.kv.kinds import Kind
from a2t.top import DISCOVERY, WIDE, Snapshot, addresses, quantile, scrape, view

RESIDENTS = {"prefix": 4, "audio": 900, "transcript": 180, "response": 60, "marker": 90, "terminator": 90}
EDGES = [20, 50, 100, 200, 500, 1000, 2000]
TIMES_MS = np.random.default_rng(0).gamma(4.0, 40.0, 4000)


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    """A node with one engine and two conversations; its address."""
    registry = CollectorRegistry()

    def gauge(name: str, value: float, **labels: str) -> None:
        name = f"ray_a2t_{name}"
        family = registry._names_to_collectors.get(name) or Gauge(name, "…", list(labels), registry=registry)
        assert isinstance(family, Gauge)
        family.labels(**labels).set(value)

    for session, state in (("sess_aa11", "live"), ("sess_bb22", "paused")):
        for kind, count in RESIDENTS.items():
            gauge("session_residents", count, session=session, kind=kind)
            gauge("session_kv_bytes", 1000.0 * count, session=session, kind=kind)
        for each in ("live", "paused", "moving"):
            gauge("session_state", float(each == state), session=session, state=each)
        for name, value in {"budget": 2000, "units": 75, "evicted": 1300, "unit_ms": 140, "deadline_misses": 2}.items():
            gauge(f"session_{name}", value, session=session)
    gauge("session_backlog_s", 1.25, session="sess_aa11")
    gauge("engine_rows", 4, engine="engine/one")
    gauge("engine_rows_free", 2, engine="engine/one")
    gauge("engine_batch_size", 1.8, engine="engine/one")
    gauge("engine_host_uss_bytes", 2.5e8, engine="engine/one")
    gauge("another_metric", 1.0, engine="engine/one")
    wanted = Gauge("ray_serve_autoscaling_desired_replicas", "…", ["deployment"], registry=registry)
    running = Gauge("ray_serve_deployment_replica_healthy", "…", ["deployment", "replica"], registry=registry)
    wanted.labels("engine").set(3)
    for deployment, replica in (("engine", "a"), ("engine", "b"), ("gateway", "c")):
        running.labels(deployment, replica).set(1)
    times = Histogram("ray_a2t_engine_unit_time_ms", "…", ["engine"], registry=registry, buckets=EDGES)
    for ms in TIMES_MS:
        times.labels("engine/one").observe(ms)
    Counter("ray_a2t_engine_missed_units", "…", ["engine"], registry=registry).labels("engine/one").inc(3)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_a_node_says(node: str) -> None:
    now, silent = scrape([node, "127.0.0.1:9"])
    assert silent == ["127.0.0.1:9"]
    assert set(now.sessions) == {"sess_aa11", "sess_bb22"}
    assert now.sessions["sess_bb22"].state == "paused"
    assert now.sessions["sess_aa11"].residents == {Kind[k.upper()]: n for k, n in RESIDENTS.items()}
    assert now.sessions["sess_aa11"].kv_bytes == 1000 * sum(RESIDENTS.values())
    assert now.engines["engine/one"].values["missed_units_total"] == 3


def test_quantiles_lie_in_the_bucket_that_holds_the_true_one(node: str) -> None:
    buckets = scrape([node])[0].engines["engine/one"].buckets
    edges = np.array([0, *EDGES])
    for q in (0.1, 0.5, 0.9, 0.99):
        true, found = float(np.quantile(TIMES_MS, q)), quantile(q, buckets, {})
        assert found is not None
        place = int(np.searchsorted(edges, true))
        assert edges[place - 1] <= found <= edges[place]
    assert quantile(0.5, buckets, buckets) is None  # nothing came since
    later = {bound: count + (10 if bound >= 2000 else 0) for bound, count in buckets.items()}
    since = quantile(0.5, later, buckets)  # ten units of one to two seconds
    assert since is not None
    assert 1000 <= since <= 2000
    slower = {bound: count + (10 if bound == float("inf") else 0) for bound, count in buckets.items()}
    assert quantile(0.5, slower, buckets) == 2000  # beyond the last bound


def shown(snapshot: Snapshot) -> str:
    console = Console(width=WIDE, file=io.StringIO(), record=True)
    console.print(view(snapshot))
    return console.export_text()


def test_the_view(node: str) -> None:
    lines = shown(scrape([node])[0]).splitlines()
    (live,) = [line.split() for line in lines if line.startswith("aa11")]
    assert live[1:5] == ["live", "0:01:15", "1,324", "2,000"]
    bar = next(cell for cell in live if "█" in cell)
    assert bar.count("█") == round(24 * 1324 / 2000)
    assert live[-3:] == ["1.2", "s", "2"]
    (engine,) = [line for line in lines if line.startswith("one ")]
    assert " 4 " in engine and "1.8" in engine and "250.0 MB" in engine
    assert "engines   3 wanted, 2 running" in lines[0]
    assert not any("…" in line for line in lines)
    assert "No engine has said anything yet" in shown(Snapshot())


def test_where_it_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(ValueError, match="no Ray runs on this machine"):
        addresses([])
    session = tmp_path / "ray" / "session_latest"
    session.mkdir(parents=True)
    (session / "metrics_export_port_abc").write_text("8080")
    assert addresses([]) == ["127.0.0.1:8080"]
    (session / DISCOVERY).write_text(json.dumps([{"labels": {"job": "ray"}, "targets": ["10.0.0.1:1", "10.0.0.2:2"]}]))
    assert addresses([]) == ["10.0.0.1:1", "10.0.0.2:2"]
    assert addresses(["10.0.0.9:9", str(session / DISCOVERY)]) == ["10.0.0.9:9", "10.0.0.1:1", "10.0.0.2:2"]
    (session / DISCOVERY).write_text("[1]")
    with pytest.raises(ValueError, match="no list of targets"):
        addresses([])


def test_the_command(node: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", node, "--once"]) == 0
    out = capsys.readouterr().out
    assert "aa11" in out and "1,324" in out and "…" not in out  # 80 columns are enough
    assert main(["top", "127.0.0.1:9", "--once"]) != 0
    assert capsys.readouterr().err.startswith("a2t top: nothing answers at 127.0.0.1:9")
    with pytest.raises(SystemExit):
        main(["top", "--every", "0"])
