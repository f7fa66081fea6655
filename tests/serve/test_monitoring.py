"""The dashboard, the alerts and `make monitoring` on a real Prometheus, over conversations that are being held."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from a2t.cli import main
from jobs.demo.call import RATE
from jobs.load.clients import Talk, converse
from jobs.monitoring import FOLDER, configuration, free_port, metrics_addresses
from tests.serve.conftest import MODEL

DASHBOARD = json.loads((FOLDER / "grafana_dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
APPLICATION = "a2t-monitored"
PATIENCE_S = 150.0  # this machine may be busy with something else


def promtool() -> str:
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    return path


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def for_everything(expression: str) -> str:
    """As Grafana fills the variables in where All is chosen."""
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    for name in names:
        expression = re.sub(rf"\${name}\b", ".*", expression)
    assert "$" not in expression, expression
    return expression


@pytest.fixture(scope="module")
def application(serve_port: int, ray_cluster: Any) -> Iterator[str]:
    """An autoscaled application; its address."""
    from ray import serve

    from serve_apps.app import AppArgs, app
    from tests.serve.conftest import sweep

    args = AppArgs(
        name=MODEL,
        model="tests.serve.local:small_model",
        engines=1,
        max_engines=2,
        rows=3,
        capacity=1024,
        max_load=1e6,
        namespace=APPLICATION,
    )
    serve.run(app(args), name=APPLICATION, route_prefix="/")
    yield f"http://127.0.0.1:{serve_port}"
    serve.delete(APPLICATION)
    sweep(ray_cluster, APPLICATION)


@asynccontextmanager
async def load(address: str, clients: int = 2) -> AsyncIterator[None]:
    """Conversations at the pace of speech, for as long as the block lasts. Raises Trouble if one of them ends."""
    pcm_S = (0.1 * np.random.default_rng(2).standard_normal(1200 * RATE)).astype(np.float32)
    talks = [Talk() for _ in range(clients)]
    tasks = [asyncio.create_task(converse(address, MODEL, pcm_S, 60, True, talk)) for talk in talks]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise AssertionError("a conversation ended before it was to") from ended


def numbers(samples: list[dict[str, Any]]) -> list[float]:
    return [value for sample in samples if not math.isnan(value := float(sample["value"][1]))]


async def test_every_panel_has_data(
    application: str, prometheus: Any, ray_cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def see(expression: str, until: Callable[[list[float]], bool] = bool) -> list[float]:
        return numbers(prometheus.wait_for(expression, lambda found: until(numbers(found)), PATIENCE_S))

    def look() -> int:
        for expression in expressions():
            see(for_everything(expression))
        for variable in DASHBOARD["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])[0]
                (sample, *_) = prometheus.wait_for(f"group by ({label}) ({metric})", timeout=PATIENCE_S)
                assert sample["metric"][label], variable["name"]
        # the figures agree with each other and with what the endpoint itself says
        (residents,) = see("sum(ray_a2t_session_residents)", lambda found: found > [0])
        assert see("sum(ray_a2t_session_kv_bytes)") > [residents]
        engine = 'engine=~".*(engine).*"'  # the deployment's name is in its engines' names
        see(f"sum(ray_a2t_engine_rows{{{engine}}})", lambda found: found == [3.0])
        return main(["top", *metrics_addresses(ray_cluster.nodes()), "--once"])

    async with load(application):
        assert await asyncio.to_thread(look) == 0
    shown = capsys.readouterr().out
    async with httpx.AsyncClient(base_url=application, timeout=60) as http:
        known = [view["id"].removeprefix("sess_")[:12] for view in (await http.get("/v1/sessions")).json()["data"]]
    assert any(name in shown for name in known), shown


def test_the_variables_choose() -> None:
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert {"deployment", "session", "node"} <= names
    for expression in expressions():
        assert re.search(r"\$(session|deployment)\b", expression), expression
    used = " ".join(expressions())
    assert all(f"${name}" in used for name in names - {"datasource"})
    places = [panel["gridPos"] for panel in PANELS]
    assert len({(p["x"], p["y"]) for p in places}) == len(places)
    assert max(p["x"] + p["w"] for p in places) == 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_rules_are_sound_and_fire(tmp_path: Path) -> None:
    rules = FOLDER / "alerts.yml"
    for command in (["check", "rules", str(rules)], ["check", "config", str(FOLDER / "prometheus.yml")]):
        checked = subprocess.run([promtool(), *command], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    tests = tmp_path / "alerts_test.yml"
    tests.write_text((Path(__file__).parent / "alerts_test.yml").read_text().replace("ALERTS", str(rules)))
    tried = subprocess.run([promtool(), "test", "rules", str(tests)], capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stdout + tried.stderr
    alerts = {rule["alert"] for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]}
    tested = {case["alertname"] for t in yaml.safe_load(tests.read_text())["tests"] for case in t["alert_rule_test"]}
    assert alerts == tested


def test_the_rules_name_what_is_exported() -> None:
    from serve_apps.metrics import ENGINE, SESSION

    counters = {"ray_a2t_engine_missed_units_total", "ray_a2t_engine_unit_time_ms_count"}
    histogram = {"ray_a2t_engine_unit_time_ms_bucket"}
    exported = (
        {f"ray_a2t_session_{n}" for n in SESSION} | {f"ray_a2t_engine_{n}" for n in ENGINE} | counters | histogram
    )
    for text in ((FOLDER / "alerts.yml").read_text(), (FOLDER / "grafana_dashboard.json").read_text()):
        assert set(re.findall(r"ray_a2t_\w+", text)) <= exported


def test_make_monitoring_over_the_cluster_that_runs_here(ray_cluster: Any, tmp_path: Path) -> None:
    promtool()
    port, address = free_port(), ray_cluster.get_runtime_context().gcs_address
    command = [
        sys.executable,
        "-m",
        "jobs.monitoring",
        "--port",
        str(port),
        "--address",
        address,
        "--out",
        str(tmp_path),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            assert f"http://127.0.0.1:{port}" in job.stdout.readline()
            found = json.loads((tmp_path / "targets.json").read_text())
            wanted = metrics_addresses(ray_cluster.nodes())
            while found[0]["targets"] != wanted and job.poll() is None:
                time.sleep(0.1)
                found = json.loads((tmp_path / "targets.json").read_text())
            rules = httpx.get(f"http://127.0.0.1:{port}/api/v1/rules", timeout=60).json()["data"]["groups"]
        finally:
            job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=60)
    assert job.returncode == 0, out + err
    assert [group["name"] for group in rules] == ["a2t"]


def test_the_configuration_differs_in_nothing_but_where_and_how_often(tmp_path: Path) -> None:
    given = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert given["scrape_configs"][0]["file_sd_configs"][0]["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
    made = configuration(tmp_path / "targets.json")
    assert made["global"] == given["global"]
    assert all(Path(name).is_file() for name in made["rule_files"])
