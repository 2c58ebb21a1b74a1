"""The record of predictions: the peak of a rank that `windlass plan` predicted, and what runs of the same plan took.

One file for each, in the folder `plans` of Windlass's own files of the user. A run finds its own by a hash of what
decides about its memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from windlass import __version__
from windlass.config.plan import RunPlan
from windlass.core.errors import ConfigError
from windlass.core.locations import home_folder
from windlass.core.mesh import Mesh
from windlass.core.optional import version_of
from windlass.core.trees import tensors_in
from windlass.core.whole_file import MAX_BYTES, read_json, write_whole

SCHEMA = "windlass-prediction/1"
_KEPT = 20
"""Runs of one plan that are kept."""
_PARTS = ("batch", "dist", "precision", "transforms", "stability")
_OF_OPTIMIZER = ("name", "options", "targets", "in_backward")


class Errors(NamedTuple):
    """How far predictions of a family of models were off, as parts of what was measured."""

    runs: int
    least: float
    most: float


def key_of(
    model: nn.Module, plan: RunPlan, mesh: Mesh, batch: Any, *, averages: bool, on_device: bool
) -> str:
    """A hash of what decides about the memory of a run, and of the versions that compute.

    Args:
        model: as it is trained, on any rank: shapes are those of whole parameters.
        batch: the first micro-batch, of whose tensors the shapes count.
        averages: the run keeps an average of its weights.
    """
    parameters = [
        [name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()
    ]
    said = {
        "model": type(model).__name__,
        "parameters": parameters,
        "plan": {name: _described(getattr(plan, name)) for name in _PARTS},
        "optimizer": {name: _described(getattr(plan.optimizer, name)) for name in _OF_OPTIMIZER},
        "mesh": dataclasses.asdict(mesh),
        "batch": [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors_in(batch)],
        "averages": averages,
        "on_device": on_device,
        "versions": [__version__, platform.python_version(), torch.__version__, version_of("transformers")],
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _described(value: Any) -> Any:
    """A value as JSON can carry it, the same in each process: of any other object, its type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _described(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _described(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    # The text of an object may have its address, which differs in each process.
    return value if isinstance(value, str | int | float | None) else type(value).__qualname__


def _folder() -> Path:
    return home_folder(os.environ) / "plans"


def are_any() -> bool:
    """Return True if something was predicted on this machine by this user, who may have no home or cannot enter it."""
    with contextlib.suppress(ConfigError):
        return os.path.isdir(_folder())  # `Path.is_dir` raises in a folder that may not be entered
    return False


def write_prediction(key: str, family: str, predicted: int) -> None:
    """Record the predicted peak of a rank in bytes. Runs that were measured stay, if it is the same. Raises OSError if
    the folder cannot be written.
    """
    earlier = find_prediction(key)
    runs = [] if earlier is None or earlier["predicted"] != predicted else earlier["runs"]
    _folder().mkdir(parents=True, exist_ok=True)
    _write({"schema": SCHEMA, "key": key, "family": family, "predicted": predicted, "runs": runs})


def find_prediction(key: str) -> dict[str, Any] | None:
    """What was predicted; None if nothing was, or it cannot be read."""
    found = _read(_folder() / f"{key[:32]}.json")
    # A file is named by a part of the key.
    return found if found is not None and found["key"] == key else None


def add_measured(key: str, measured: int, date: str) -> None:
    """Record what a run took. Does nothing if there is no prediction, or the folder cannot be written."""
    found = find_prediction(key)
    if found is not None:
        found["runs"] = [*found["runs"], {"date": date, "measured": measured}][-_KEPT:]
        with contextlib.suppress(OSError):
            _write(found)


def errors_of(family: str) -> Errors | None:
    """The errors of all predictions for a family of models of which runs were measured; None if none was."""
    found = [
        record["predicted"] / run["measured"] - 1
        for path in sorted(_folder().glob("*.json"))
        if (record := _read(path)) is not None and record["family"] == family
        for run in record["runs"]
    ]
    return Errors(len(found), min(found), max(found)) if found else None


def _write(record: dict[str, Any]) -> None:
    write_whole(_folder() / f"{record['key'][:32]}.json", json.dumps(record, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any] | None:
    found = read_json(path, MAX_BYTES)
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not _is_size(found.get("predicted")):
        return None
    runs = found.get("runs")
    if not isinstance(runs, Sequence) or not all(
        isinstance(run, dict) and _is_size(run.get("measured")) for run in runs
    ):
        return None
    return found if isinstance(found.get("key"), str) and isinstance(found.get("family"), str) else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
