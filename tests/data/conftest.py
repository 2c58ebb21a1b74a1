"""What the data tests check around a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """`caplog` for the `windlass` loggers, from INFO on; they do not propagate to the root."""
    logger = logging.getLogger("windlass")
    before = logger.level, logger.propagate
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(before[0])
    logger.propagate = before[1]


@pytest.fixture
def untouched_generators() -> Iterator[None]:
    """Fails where the test's body moves NumPy's or PyTorch's default generator."""
    states = np.random.get_state()[1].copy(), np.random.get_state()[2], torch.get_rng_state()
    yield
    assert (np.random.get_state()[1] == states[0]).all()
    assert np.random.get_state()[2] == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
