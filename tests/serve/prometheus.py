"""A real Prometheus over the tests' Ray cluster, one for the whole run. tests/serve/conftest.py makes it a fixture."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from jobs.monitoring import Prometheus, metrics_addresses


@pytest.fixture(scope="session")
def prometheus(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes every second. `query(expression)` gives the samples now, `wait_for(expression, until)` asks until it
    holds; Ray exports a gauge up to 10 s after it was set. Both block: from a coroutine, use `asyncio.to_thread`."""
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed (apt install prometheus)")
    with Prometheus(tmp_path_factory.mktemp("prometheus"), scrape_s=1.0) as server:
        server.scrape(metrics_addresses(ray_cluster.nodes()))
        yield server
