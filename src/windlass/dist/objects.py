"""Python values between processes, as JSON: what arrives is built from plain parts, and nothing of it is run.

JSON's values stand for themselves. What it lacks is an object with one key that starts with `$`: tuples, sets, bytes,
paths, maps whose keys are not strings, tensors and arrays (their bytes, so they arrive exactly).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.core.errors import DataError
from windlass.dist.gang import Gang

_PLAIN = (bool, int, float, str, type(None))


def collect(value: Any, gang: Gang, operation: str = "gather_object") -> list[Any]:
    """Every process's value, in rank order; on all of them an error where one has a value that cannot travel.

    Raises:
        DataError: names the process, the place in its value, and the type that cannot travel.
    """
    if gang.size == 1:
        return [value]
    try:
        message = {"value": pack(value, "value")}
    except DataError as error:
        message = {"error": str(error)}
    answers = gang.gather_objects(message)
    wrong = [f"process {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
    if wrong:
        raise DataError(f"{operation} cannot send this: " + "; ".join(wrong))
    return [unpack(answer["value"]) for answer in answers]


def hand_out(value: Any, source: int, gang: Gang, operation: str = "broadcast_object_list") -> Any:
    """The value of process `source`, on every process."""
    if not 0 <= source < gang.size:
        raise DataError(f"{operation}: there is no process {source}; there are {gang.size}, counted from 0")
    return collect(value if gang.rank == source else None, gang, operation)[source]


def pack(value: Any, path: str) -> Any:
    """`value` as what JSON can carry; `path` says where it is, for errors."""
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return _items(value, path)
    if isinstance(value, Mapping):
        return _map(value, path)
    if type(value) in (tuple, torch.Size):
        return {"$tuple": _items(value, path)}
    if isinstance(value, set | frozenset):
        return {"$set": _items(list(value), path)}
    if isinstance(value, bytes):
        return {"$bytes": _text(value)}
    if isinstance(value, Path):
        return {"$path": str(value)}
    if isinstance(value, Tensor):
        return {"$tensor": _tensor(value)}
    if isinstance(value, np.ndarray | np.generic):
        return {"$array": _array(value, path), "scalar": isinstance(value, np.generic)}
    if isinstance(value, bool | int | float | str):  # a subclass, such as a member of an enumeration
        return pack(_base(value), path)
    raise DataError(
        f"{path} is a {type(value).__name__}, and only plain values travel between processes: numbers, strings, lists, "
        "tuples, sets, dicts, bytes, paths, arrays and tensors; send its fields"
    )


def unpack(value: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind in _READERS:
        return _READERS[kind](value)
    return {key: unpack(item) for key, item in value.items()}


def _items(values: Any, path: str) -> list[Any]:
    return [pack(item, f"{path}[{index}]") for index, item in enumerate(values)]


def _map(value: Mapping[Any, Any], path: str) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: pack(item, f"{path}[{key!r}]") for key, item in value.items()}
    pairs = [[pack(key, f"a key of {path}"), pack(item, f"{path}[{key!r}]")] for key, item in value.items()]
    return {"$map": pairs}


def _base(value: Any) -> Any:
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tensor(value: Tensor) -> list[Any]:
    host = value.detach().cpu().contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(host.dtype).removeprefix("torch."), list(host.shape), _text(data)]


def _read_tensor(parts: list[Any]) -> Tensor:
    dtype, shape, text = parts
    data = bytearray(base64.b64decode(text))
    kind: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer(data, dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)


def _array(value: Any, path: str) -> list[Any]:
    if value.dtype.kind not in "biufcSUMm":
        raise DataError(f"{path} is an array of dtype {value.dtype}, which does not travel; send a list")
    return [value.dtype.str, list(value.shape), _text(np.ascontiguousarray(value).tobytes())]


def _read_array(value: dict[str, Any]) -> Any:
    dtype, shape, text = value["$array"]
    array = np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype)).reshape(shape).copy()
    return array[()] if value["scalar"] else array


_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "$tuple": lambda value: tuple(unpack(value["$tuple"])),
    "$set": lambda value: set(unpack(value["$set"])),
    "$bytes": lambda value: base64.b64decode(value["$bytes"]),
    "$path": lambda value: Path(value["$path"]),
    "$tensor": lambda value: _read_tensor(value["$tensor"]),
    "$array": _read_array,
    "$map": lambda value: {unpack(key): unpack(item) for key, item in value["$map"]},
}
