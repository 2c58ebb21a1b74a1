"""Environment variables, as scripts and tests read and set them for a while."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from windlass.config.parallel.kinds import FALSE, TRUE, flag
from windlass.config.plugin_words import distributed_type_of
from windlass.core.device import choose_device


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 or 0 for a word of consent or refusal, in any case; with `to_bool`, True or False.

    Raises:
        ValueError: it is neither.
    """
    try:
        said = flag(value)
    except ValueError:
        known = f"true ({', '.join(TRUE)}) nor false ({', '.join(FALSE)})"
        raise ValueError(f"{value!r} is neither {known}") from None
    return said if to_bool else int(said)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables that holds a number of at least 0, else `default`."""
    found = (int(os.environ.get(key, -1)) for key in env_keys)
    return next((value for value in found if value >= 0), default)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Whether the variable says yes."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The variable's text."""
    return os.environ.get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of these packages that were imported already."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """The kind of device that a process here would compute on, and the kind of job several of them would be."""
    kind = choose_device().type
    return kind, str(distributed_type_of(kind, 2))


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables, in upper case, while the body runs."""
    with _restored():
        for key, value in kwargs.items():
            os.environ[key.upper()] = str(value)
        yield


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Take all variables away while the body runs."""
    with _restored():
        os.environ.clear()
        yield


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorator of a test, or of a class of tests: what they leave in `ACCELERATE_*` and `WINDLASS_*` is undone."""
    if not isinstance(func_or_cls, type):
        return _purged(func_or_cls)
    for name, value in list(vars(func_or_cls).items()):
        if name.startswith("test") and callable(value):
            setattr(func_or_cls, name, _purged(value))
    return func_or_cls


def _purged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _restored(("ACCELERATE_", "WINDLASS_")):
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _restored(prefixes: tuple[str, ...] = ("",)) -> Iterator[None]:
    """Variables that begin so are afterwards what they were before."""
    before = {key: value for key, value in os.environ.items() if key.startswith(prefixes)}
    try:
        yield
    finally:
        for key in [key for key in os.environ if key.startswith(prefixes) and key not in before]:
            del os.environ[key]
        os.environ.update(before)
