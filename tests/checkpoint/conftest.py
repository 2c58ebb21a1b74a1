from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_disk() -> Iterator[Path]:
    """A folder in memory if there is one: tests that save a thousand times need fsync called, not waited for."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix="windlass-") as folder:
        yield Path(folder)
