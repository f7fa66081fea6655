"""A real Prometheus over the tests' Ray cluster, a module at a time. tests/serve/conftest.py makes it a fixture."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from jobs.monitoring import Prometheus, metrics_addresses

SCRAPE_S = 5.0
"""Also the time that a scrape may take. A node writes thousands of figures, more with every process that it has seen,
and needs most of a second for it even where nothing else runs: asked more often than it can answer, it never does."""


@pytest.fixture(scope="module")
def prometheus(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """`query(expression)` gives the samples now, `wait_for(expression, until)` asks until it holds; Ray exports a gauge
    up to 10 s after it was set. Both block: from a coroutine, use `asyncio.to_thread`."""
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed (apt install prometheus)")
    with Prometheus(tmp_path_factory.mktemp("prometheus"), scrape_s=SCRAPE_S) as server:
        server.scrape(metrics_addresses(ray_cluster.nodes()))
        yield server
