"""What the tests of the configuration share."""

from __future__ import annotations

import logging
import warnings
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
    """The messages that Windlass logs and the warnings that it issues during a test.

    What is said once a process may be said once a test.
    """
    keeper = _Keeper()
    logger = logs.get_logger("windlass")
    logger.addHandler(keeper)
    logs._seen.cache_clear()
    logs._warned.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: keeper.messages.append(str(message))
        yield keeper.messages
    logger.removeHandler(keeper)
    logs._seen.cache_clear()
    logs._warned.cache_clear()
