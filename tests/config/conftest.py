"""What the tests of the configuration share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from windlass.core import logs


class _Keeper(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The messages that Windlass logs during a test; what is said once a process may be said once a test."""
    keeper = _Keeper()
    logger = logs.get_logger("windlass")
    logger.addHandler(keeper)
    logs._seen.cache_clear()
    yield keeper.messages
    logger.removeHandler(keeper)
    logs._seen.cache_clear()
