from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def second() -> np.ndarray:
    """One second of quiet noise."""
    return (0.01 * np.random.default_rng(0).standard_normal(16_000)).astype(np.float32)
