"""Keeps remarks of libraries off the screen of a command: its user cannot act on them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from windlass.core.logs import SCRIPT_HINTS
from windlass.core.optional import require
from windlass.core.output import is_terminal
from windlass.core.package_remarks import LOGGERS, hidden_deprecations

# The last but one reports each try to reach the Hub.
_LOGGERS = (*LOGGERS, "huggingface_hub.utils._http", SCRIPT_HINTS)
_NO_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"  # of huggingface_hub, which transformers reads too


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Within the body, hide warnings of libraries, and their bars if standard error is not a terminal. Their errors are
    shown.

    Nothing is imported. Warnings are left alone if the options of Python (`-W`, `PYTHONWARNINGS`) choose them.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    hides_bars = _NO_BARS not in os.environ and not is_terminal(sys.stderr)
    with hidden_deprecations():
        for logger in loggers:
            logger.setLevel(logging.ERROR)
            logger.addFilter(_is_error)  # DeepSpeed sets the level of its own when it is imported
        if hides_bars:
            os.environ[_NO_BARS] = "1"
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
                logger.removeFilter(_is_error)
            if hides_bars:
                os.environ.pop(_NO_BARS, None)


def hide_loading_bars() -> None:
    """Hide the bars that transformers draws while it loads weights: commands have a row for that. Bars of downloads are
    those of another library, and stay.
    """
    bars = require("transformers.utils.logging", "load a model")
    # `disable_progress_bar` would hide the bars of downloads too, which take minutes.
    set_hook = getattr(bars, "set_tqdm_hook", None)  # of recent versions
    if set_hook is not None:
        set_hook(lambda factory, arguments, options: factory(*arguments, **{**options, "disable": True}))


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
