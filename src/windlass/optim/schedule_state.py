"""The state of a script's scheduler as data that a checkpoint can hold, and back.

Torch's schedulers return all their attributes. Those that are code (functions, methods, classes) are made again by the
constructor and are not saved. Values that are data under another type (enumerations, dtypes, sets, paths, deques) are
saved as plain data, and get the type that the scheduler of the resumed run has there.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import deque
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch

from windlass.core.types import State


def state_as_data(scheduler: Any) -> State:
    """The scheduler's state. What is neither data nor code stays in it, and cannot be saved."""
    state: State = _data(scheduler.state_dict())
    return state


def load_data(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Load a result of `state_as_data`, or the scheduler's own state, into `scheduler`."""
    scheduler.load_state_dict(_typed(scheduler.state_dict(), dict(state)))


def _is_code(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, type | functools.partial)


def _data(value: Any) -> Any:
    if _is_code(value):
        return None
    if isinstance(value, Enum):
        return _data(value.value)
    if isinstance(value, dict):
        return {key: _data(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_data(item) for item in value)
    if isinstance(value, list | deque):
        return [_data(item) for item in value]
    if isinstance(value, set | frozenset):
        # Sorted, so that a run and its repetition write the same file.
        return sorted((_data(item) for item in value), key=repr)
    if isinstance(value, PurePath):
        return str(value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _typed(live: Any, value: Any) -> Any:
    """`value` in the types of `live`, the present value in its place."""
    if _is_code(live):
        return live
    if isinstance(live, dict) and isinstance(value, dict):
        restored = copy.copy(live)  # also a Counter, or a map with a default
        restored.clear()
        restored.update({key: _typed(live.get(key), item) for key, item in value.items()})
        return restored
    if isinstance(live, list | tuple) and isinstance(value, list | tuple) and len(live) == len(value):
        items = [_typed(*pair) for pair in zip(live, value, strict=True)]
        is_named = isinstance(live, tuple) and type(live) is not tuple
        return type(live)(*items) if is_named else type(live)(items)
    if isinstance(live, torch.dtype) and isinstance(value, str):
        return getattr(torch, value)
    if isinstance(live, deque) and not isinstance(value, deque):
        return deque(value, live.maxlen)
    if isinstance(live, Enum | set | frozenset | PurePath) and not isinstance(value, type(live)):
        return type(live)(value)
    return value
