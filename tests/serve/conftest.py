"""The application on Ray that tests of the endpoint share, a module at a time: any order, any module alone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.serve.prometheus import prometheus as prometheus  # a fixture

# Serve reads it where its controller starts: 5 s are too few on a busy machine
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")

MODEL = "random"
NAMESPACE = "a2t-test"


@pytest.fixture
def second() -> np.ndarray:
    """One second of quiet noise."""
    return (0.01 * np.random.default_rng(0).standard_normal(16_000)).astype(np.float32)


@pytest.fixture(scope="module")
def serve_port(ray_cluster: Any) -> Iterator[int]:
    """Serve itself, without an application, on a port of this machine; whatever ran there ends with the module."""
    from ray import serve

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    serve.shutdown()  # what another module may have left would keep its own port
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()  # says nothing where a test has done so already
    sweep(ray_cluster)


@pytest.fixture(scope="module")
def address(serve_port: int) -> str:
    """`http://127.0.0.1:PORT` of the application: one engine, one row, a small random model called "random"."""
    from ray import serve

    from serve_apps.app import AppArgs, app

    args = AppArgs(
        name=MODEL,
        model="tests.serve.local:small_model",
        rows=1,
        capacity=1024,
        max_load=1e6,  # admission by rows alone: this machine may be busy with something else
        side_channel_budget_s=None,
        namespace=NAMESPACE,
    )
    serve.run(app(args), name=NAMESPACE, route_prefix="/")
    return f"http://127.0.0.1:{serve_port}"


def named(ray: Any, prefix: str = "", namespace: str = NAMESPACE) -> list[str]:
    """Names of the application's own actors: `engine/...`, `session/...`."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(a["name"] for a in actors if a["namespace"] == namespace and a["name"].startswith(prefix))


def sweep(ray: Any, namespace: str = NAMESPACE) -> None:
    """Session actors are detached: they outlive the application."""
    for name in named(ray, namespace=namespace):
        try:
            ray.kill(ray.get_actor(name, namespace=namespace))
        except ValueError:  # gone since it was listed
            continue
    until = time.monotonic() + 60
    while left := named(ray, namespace=namespace):
        assert time.monotonic() < until, f"actors that do not end: {left}"
        time.sleep(0.1)
