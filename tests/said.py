"""A fixture, and a context: what is logged and warned meanwhile."""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """The messages that Windlass logs and the warnings that it issues within the body.

    What is said once a process may be said once here.
    """
    keeper = _Keeper()
    logger = logs.get_logger("windlass")
    logger.addHandler(keeper)
    logs.warn_once.cache_clear()
    logs.warn_of_argument.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: keeper.messages.append(str(message))
            yield keeper.messages
    finally:
        logger.removeHandler(keeper)
        logs.warn_once.cache_clear()
        logs.warn_of_argument.cache_clear()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The messages that Windlass logs and the warnings that it issues during a test."""
    with listening() as messages:
        yield messages
