"""Refuse a configuration with all that is wrong in it."""

from __future__ import annotations

from collections.abc import Iterable

from windlass.core.errors import ConfigError, Problem


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ConfigError with the problems, if there are any."""
    if found := list(problems):
        raise ConfigError(found)
