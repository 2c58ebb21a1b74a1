"""Keeps remarks of installed packages off the screen that a user cannot act on: at import they report what they found
of optional parts of their own, and they call deprecated functions of each other.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

LOGGERS = (
    "torchao",
    "bitsandbytes",
    "bitsandbytes.backends.cpu.ops",
    "torch.utils._pytree",
    "DeepSpeed",
    "transformers.integrations.hub_kernels",
)
_CATEGORIES = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, SyntaxWarning)
_OTHERS = ("already registered as pytree node",)  # in warnings of no category of their own
_INSTALLED = ("site-packages", "dist-packages")
_MODULES = r"(transformers|peft|torchao|torch|bitsandbytes|deepspeed|datasets|tokenizers|accelerate)(\.|$)"


@contextlib.contextmanager
def hidden_deprecations() -> Iterator[None]:
    """Within the body, hide that libraries call deprecated functions of each other, unless the options of Python (`-W`,
    `PYTHONWARNINGS`) choose warnings.
    """
    with warnings.catch_warnings():
        if not sys.warnoptions:
            for category in (FutureWarning, DeprecationWarning):
                warnings.filterwarnings("ignore", category=category, module=_MODULES)
        yield


def mute_import_remarks() -> None:
    """From now on, hide what installed packages log and warn of while they are imported. Errors are shown, and what a
    script's own calls lead to; warnings also if the options of Python (`-W`, `PYTHONWARNINGS`) choose them.
    """
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_wanted)
    if not sys.warnoptions:
        warnings.showwarning = _showing_wanted(warnings.showwarning)


@contextlib.contextmanager
def muted_import_remarks() -> Iterator[None]:
    """The same within the body."""
    before = warnings.showwarning
    loggers = [logging.getLogger(name) for name in LOGGERS]
    mine = [logger for logger in loggers if _is_wanted not in logger.filters]
    mute_import_remarks()
    try:
        yield
    finally:
        warnings.showwarning = before
        for logger in mine:
            logger.removeFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or not _imports_a_package()


def _showing_wanted(show: Callable[..., None]) -> Callable[..., None]:
    def show_wanted(message: Any, category: type[Warning], *place: Any, **options: Any) -> None:
        is_remark = issubclass(category, _CATEGORIES) or any(part in str(message) for part in _OTHERS)
        if not (is_remark and _imports_a_package()):
            show(message, category, *place, **options)

    return show_wanted


def _imports_a_package() -> bool:
    """Return True if the module that is being executed, the innermost one, is one of an installed package."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            file = str(frame.f_globals.get("__file__", ""))
            return frame.f_globals.get("__name__") != "__main__" and any(part in file for part in _INSTALLED)
        frame = frame.f_back  # type: ignore[assignment]
    return False
