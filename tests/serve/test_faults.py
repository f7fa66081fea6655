"""What `tests.serve.drill` saw: an engine, a session actor, the gateway and a node killed in mid-conversation."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from serve_apps.gateway import HEALTH_S

ROOT = Path(__file__).resolve().parents[2]
PROMISED_S = 3.0
"""From the moment that the loss is noticed."""
KINDS = ("engine", "session", "gateway", "node")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
    folder = tmp_path_factory.mktemp("drill")
    log, told = folder / "log", folder / "told.json"
    # a folder of its own: what other processes call "the cluster of this machine" is not to be this one
    with log.open("w") as out, tempfile.TemporaryDirectory(prefix="a2t-", ignore_cleanup_errors=True) as ray:
        environment["RAY_TMPDIR"] = ray
        done = subprocess.run(
            [sys.executable, "-m", "tests.serve.drill", str(port), str(told)],
            cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=900, check=False,
        )  # fmt: skip
    assert done.returncode == 0, "\n".join(log.read_text().splitlines()[-60:])
    return json.loads(told.read_text())


def allowed_s(told: Any, kind: str) -> float:
    """A machine that is busy with something else takes longer, up to twice as long."""
    return float(PROMISED_S * min(2.0, max(1.0, told[kind]["load"])))


@pytest.mark.parametrize("kind", KINDS)
def test_the_transcript_is_intact_and_every_conversation_goes_on(told: Any, kind: str) -> None:
    for caller in told[kind]["callers"]:
        assert caller["kept"], caller
        for move in caller["moves"]:
            assert not move["exact"]
            assert move["seconds"] < allowed_s(told, kind), told[kind]


def test_no_unit_is_lost_or_told_differently(told: Any) -> None:
    for conversation in told["conversations"]:
        assert conversation["complete"], conversation
        assert conversation["same"], conversation
        assert conversation["units"] >= 6
        assert conversation["errors"] == []


def test_a_dead_engine_moves_its_conversations_and_no_other(told: Any) -> None:
    victim = told["engine"]["victim"]
    assert {c["engine"] == victim for c in told["engine"]["callers"]} == {True, False}
    for caller in told["engine"]["callers"]:
        assert [m["from"] for m in caller["moves"]] == ([victim] if caller["engine"] == victim else []), caller
        assert caller["sockets"] == 0, caller  # nobody has to call again
        assert caller["pause_s"] < allowed_s(told, "engine"), caller


def test_a_dead_session_actor_is_noticed_by_nobody_else(told: Any) -> None:
    for caller in told["session"]["callers"]:
        assert caller["moves"] == [], caller
        assert caller["pause_s"] < allowed_s(told, "session"), caller
        if caller["id"] != told["session"]["victim"]:
            assert caller["sockets"] == 0, caller


def test_a_dead_gateway_costs_the_socket_alone(told: Any) -> None:
    for caller in told["gateway"]["callers"]:
        assert caller["moves"] == [], caller
        assert caller["sockets"] >= 1
        assert caller["pause_s"] < allowed_s(told, "gateway") + HEALTH_S, caller  # when Serve looks after it


def test_a_dead_node_moves_what_its_engine_held(told: Any) -> None:
    victim = told["node"]["victim"]
    assert {c["engine"] == victim for c in told["node"]["callers"]} == {True, False}
    for caller in told["node"]["callers"]:
        lost = caller["engine"] == victim
        assert [m["from"] for m in caller["moves"]] == ([victim] if lost else []), caller
        if not told["gateway_lost"]:
            assert caller["sockets"] == 0, caller
            assert caller["pause_s"] < allowed_s(told, "node") + lost * told["noticed_s"], caller
