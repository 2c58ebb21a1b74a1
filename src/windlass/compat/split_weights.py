"""Weights in several files with an index, as scripts load them into a model by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from windlass.checkpoint.names import counted, shorten
from windlass.checkpoint.stored import open_folder, open_weights
from windlass.core.errors import CheckpointError
from windlass.dist.sharded import local, part

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class MisfitError(CheckpointError, RuntimeError):
    """Weights that do not fit a model; also a RuntimeError, as `Module.load_state_dict` raises."""


class UnmatchedNames(NamedTuple):
    """Names of the model without weights, and of weights that the model does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_sharded_checkpoint(
    model: nn.Module, folder: str | os.PathLike[str], strict: bool = True, prefer_safe: bool = True
) -> UnmatchedNames:
    """Copy weights that lie in several files with an index into `model`, one tensor after another.

    Args:
        strict: names must be those of the model's state dict.
        prefer_safe: kept for scripts that set it: safetensors are always preferred. Files of `torch.save` are read
            without unpickling them.

    Raises:
        CheckpointError: there is no index, or a file is damaged.
        MisfitError: with `strict`, names are missing or unexpected; a shape differs; a weight is on the meta device.
    """
    path = Path(folder)
    index = next((name for name in _INDEXES if (path / name).is_file()), None)
    if index is None:
        raise CheckpointError(f"{path} holds no index of weights: there is no {' or '.join(_INDEXES)}")
    state = {
        name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
    }
    with open_weights(open_folder(path), index) as tensors, torch.no_grad():
        sources = {name: tensors.aliases.get(name, name) for name in state}
        found = {name: source for name, source in sources.items() if source in tensors}
        missing = [name for name in state if name not in found]
        unexpected = [name for name in tensors.names if name not in found.values()]
        if strict and (missing or unexpected):
            said = counted((missing, "missing in the files"), (unexpected, "unknown to the model"))
            raise MisfitError(f"{path} does not fit this {type(model).__name__}: {said}")
        wrong = [name for name, source in found.items() if tensors.shape(source) != tuple(state[name].shape)]
        if wrong:
            raise MisfitError(f"{path} has {len(wrong)} tensors of another shape: {shorten(wrong)}")
        # A copy to them does nothing, and says nothing.
        if empty := [name for name in found if local(state[name]).is_meta]:
            raise MisfitError(
                f"weights of this {type(model).__name__} are on the meta device, which has no memory to load "
                f"{path} into: {shorten(empty)}; use load_checkpoint_in_model"
            )
        # Nothing is changed before everything is checked.
        for name, source in found.items():
            local(state[name]).copy_(tensors.read(source, part(state[name])))
    return UnmatchedNames(missing, unexpected)
