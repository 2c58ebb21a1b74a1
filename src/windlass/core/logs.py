"""Logging for the `windlass` logger tree, with the verbosity calls that scripts know."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import textwrap
import warnings
from collections.abc import Iterator
from logging import CRITICAL, DEBUG, ERROR, FATAL, INFO, NOTSET, WARN, WARNING
from pathlib import Path

from windlass.core.output import STDERR, STDOUT, in_notebook, shown
from windlass.core.terminal import row_width
from windlass.core.world import world_from_environment

__all__ = [
    "CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "NOTSET", "WARN", "WARNING", "disable_default_handler",
    "disable_propagation", "enable_default_handler", "enable_explicit_format", "enable_propagation",
    "get_job_logger", "get_logger",
    "get_verbosity", "log_levels", "set_verbosity", "set_verbosity_debug", "set_verbosity_error",
    "set_verbosity_info", "set_verbosity_warning", "showing_place", "warn_of_argument", "warn_once",
]  # fmt: skip

log_levels = {
    "detail": DEBUG,
    "debug": DEBUG,
    "info": INFO,
    "warning": WARNING,
    "error": ERROR,
    "critical": CRITICAL,
}
SCRIPT_HINTS = "windlass.hints"
"""The logger of what a script may do next; commands print what their users may do instead."""
_PACKAGE = str(Path(__file__).parents[1])


class _Clean(logging.Filter):
    """Takes secrets and control characters out of a record, before any handler sees it."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = shown(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = shown(_FORMATTER.formatException(record.exc_info))
        return True


class _Folding(logging.Formatter):
    """Folds a line at spaces if it is longer than the terminal is wide; stacks and lists stay as they are."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if "\n" in text or not STDERR.isatty():
            return text
        return textwrap.fill(text, row_width(), break_long_words=False, break_on_hyphens=False)


_FORMATTER = _Folding("windlass: %(message)s")
_clean = _Clean()
# `STDERR` writes to the current `sys.stderr`, which tests replace. Notebooks show it in red, like errors.
_HANDLER = logging.StreamHandler(STDOUT if in_notebook() else STDERR)
_HANDLER.setFormatter(_FORMATTER)
_ROOT = logging.getLogger("windlass")
_ROOT.addHandler(_HANDLER)
_ROOT.setLevel(WARNING)
_ROOT.propagate = False
# The level that a Trainer set: the one before it. A script that set another one since, by whatever call, is followed.
_of_trainer: dict[int, int] = {}


def get_logger(name: str | None = None) -> logging.Logger:
    """A logger of the `windlass` tree; its level is that of `set_verbosity`."""
    found = logging.getLogger(name or "windlass")
    found.addFilter(_clean)  # added once, however often
    return found


class JobLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs on the main process only."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 (the name is the standard library's)
        return world_from_environment().is_main and super().isEnabledFor(level)


def get_job_logger(name: str) -> JobLogger:
    """A logger for messages that are the same on all processes of a job: the main process logs them."""
    return JobLogger(get_logger(name), {})


def get_verbosity() -> int:
    return _ROOT.getEffectiveLevel()


def set_verbosity(level: int) -> None:
    """Level (`logging.INFO`, ...) of everything that Windlass logs in this process."""
    _of_trainer.clear()
    _set_level(level)


def script_verbosity() -> int:
    """The level that the script left, whatever the arguments of a Trainer have set since."""
    return _of_trainer.get(_ROOT.level, get_verbosity())


def set_trainer_verbosity(level: int) -> None:
    """`set_verbosity` for one Trainer: a later one without a level of its own gets that of the script again."""
    before = script_verbosity()
    _of_trainer.clear()
    _of_trainer[level] = before
    _set_level(level)


def _set_level(level: int) -> None:
    if _ROOT.level != level:  # to set it empties what each logger of the process keeps
        _ROOT.setLevel(level)


set_verbosity_debug = functools.partial(set_verbosity, DEBUG)
set_verbosity_info = functools.partial(set_verbosity, INFO)
set_verbosity_warning = functools.partial(set_verbosity, WARNING)
set_verbosity_error = functools.partial(set_verbosity, ERROR)


def enable_default_handler() -> None:
    _ROOT.addHandler(_HANDLER)


def disable_default_handler() -> None:
    _ROOT.removeHandler(_HANDLER)


def enable_propagation() -> None:
    """Hand records on to the root logger too, for `logging.basicConfig`; turn the default handler off with it."""
    _ROOT.propagate = True


def disable_propagation() -> None:
    _ROOT.propagate = False


def enable_explicit_format() -> None:
    """Lines as `[LEVEL|file:line] time >> message`."""
    for handler in _ROOT.handlers:
        handler.setFormatter(
            logging.Formatter("[%(levelname)s|%(filename)s:%(lineno)s] %(asctime)s >> %(message)s")
        )


@contextlib.contextmanager
def showing_place(library: str, written: Path, shown: Path) -> Iterator[None]:
    """Within the body, what a library logs names `shown`, the place where its files end up, instead of the folder
    `written` into which it writes them.
    """
    place = _Place(str(written), str(shown))
    handlers = [*logging.getLogger(library).handlers, *logging.getLogger().handlers]
    for handler in handlers:
        handler.addFilter(place)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(place)


class _Place(logging.Filter):
    """Replaces a path in all records."""

    def __init__(self, written: str, shown: str) -> None:
        super().__init__()
        self._written, self._shown = written, shown

    def filter(self, record: logging.LogRecord) -> bool:
        if self._written in (text := record.getMessage()):
            record.msg, record.args = text.replace(self._written, self._shown), None
        return True


# Cached, so that the second call with the same message is a hit and warns of nothing.
@functools.cache
def warn_once(logger: logging.Logger | JobLogger, message: str) -> None:
    """Warn the first time this message is given in this process, and never again."""
    logger.warning(message)


@functools.cache
def warn_of_argument(message: str) -> None:
    """Issue this warning the first time in this process, at the line of the script that led to it."""
    warnings.warn(shown(message), stacklevel=_depth_of_script())


def _depth_of_script() -> int:
    """Return the `stacklevel`, for the caller, of the first frame outside of this package and of generated code."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<string>")):
        frame, depth = frame.f_back, depth + 1
    return depth
