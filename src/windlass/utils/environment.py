"""Read environment variables, and set them temporarily."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from windlass.config.enums import distributed_type_of
from windlass.config.kinds import FALSE, TRUE, flag
from windlass.core.device import choose_device


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 or 0 for a word for true or false, in upper or lower case; with `to_bool`, True or False. Raises
    ValueError if it is neither.
    """
    try:
        found = flag(value)
    except ValueError:
        known = f"true ({', '.join(TRUE)}) nor false ({', '.join(FALSE)})"
        raise ValueError(f"{value!r} is neither {known}") from None
    return found if to_bool else int(found)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of these variables that is a number of at least 0, else `default`."""
    found = (int(os.environ.get(key, -1)) for key in env_keys)
    return next((value for value in found if value >= 0), default)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return True if the variable is a word for true."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable's text."""
    return os.environ.get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the packages among these that have been imported."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """Return the type of the device of a process here, and the type of a job of several processes."""
    kind = choose_device().type
    return kind, str(distributed_type_of(kind, 2))


def enable_fsdp_ram_efficient_loading() -> None:
    """Have this process and those that it starts shard their models, of which the first process of each machine alone
    reads the weights. Sets the two variables of accelerate's launcher; what `ACCELERATE_USE_FSDP` says already stays.
    """
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Have each process of a sharded model read its weights."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables, with names in upper case, while the body runs. Others that it sets stay."""
    given = {key.upper(): str(value) for key, value in kwargs.items()}
    with _restored(given.__contains__):
        os.environ.update(given)
        yield


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all variables while the body runs."""
    with _restored(lambda name: True):
        os.environ.clear()
        yield


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorator of a test or a class of tests: restores `ACCELERATE_*` and `WINDLASS_*` afterwards."""
    restored = _restored(lambda name: name.startswith(("ACCELERATE_", "WINDLASS_")))
    if not isinstance(func_or_cls, type):
        return restored(func_or_cls)
    for name, value in list(vars(func_or_cls).items()):
        if name.startswith("test") and callable(value):
            setattr(func_or_cls, name, restored(value))
    return func_or_cls


@contextlib.contextmanager
def _restored(chosen: Callable[[str], bool]) -> Iterator[None]:
    """Restore the variables with the chosen names afterwards."""
    before = {name: value for name, value in os.environ.items() if chosen(name)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if chosen(name) and name not in before]:
            del os.environ[name]
        os.environ.update(before)
