"""What the data tests check around a test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def untouched_generators() -> Any:
    """Fails where the test's body moves NumPy's or PyTorch's default generator."""
    states = np.random.get_state()[1].copy(), np.random.get_state()[2], torch.get_rng_state()
    yield
    assert (np.random.get_state()[1] == states[0]).all()
    assert np.random.get_state()[2] == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
