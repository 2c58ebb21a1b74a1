"""Folders for tests that save after every update."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where the system has one: a save waits for the disk, which these tests do not test."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="windlass-") as name:
        yield Path(name)
