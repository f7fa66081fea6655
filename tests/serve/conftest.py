from __future__ import annotations

import os

import numpy as np
import pytest

from tests.serve.prometheus import prometheus as prometheus  # a fixture

# Serve reads it where its controller starts: 5 s are too few on a busy machine
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")


@pytest.fixture
def second() -> np.ndarray:
    """One second of quiet noise."""
    return (0.01 * np.random.default_rng(0).standard_normal(16_000)).astype(np.float32)
