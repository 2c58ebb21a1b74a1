"""Files that a script writes beside checkpoints: a model's weights, tensors and plain values."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from torch import nn

from windlass.accelerator.own_files import save_tensors, save_values
from windlass.accelerator.prepared import Prepared
from windlass.checkpoint.split import save_split
from windlass.core.errors import ConfigError, Problem
from windlass.core.locations import is_url
from windlass.core.module_state import state_of
from windlass.dist.gang import Gang
from windlass.transforms.module_sizes import convert_file_size_to_int
from windlass.transforms.offload import (
    get_state_dict_offloaded_model,
    has_offloaded_params,
    load_offloaded_parameter,
)


class ModelFiles:
    """Reads state dicts of models, and writes single files."""

    def __init__(self, gang: Gang, prepared: Prepared) -> None:
        self._gang, self._prepared = gang, prepared

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state dict with whole tensors. Collective.

        If the model is sharded, the main process gets it in host memory, and others get an empty one. Offloaded
        weights are read from where they are.
        """
        if any(map(has_offloaded_params, model.modules())):
            return dict(get_state_dict_offloaded_model(model))
        strategy = self._prepared.strategy_of(model)
        if strategy is None or not (unwrap or strategy.sharded):
            return dict(model.state_dict())
        return strategy.whole_state()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights as safetensors files that `from_pretrained` reads. Collective.

        Args:
            max_shard_size: maximum size of a file ("5GB", "200MB", or bytes); several files get an index.
            safe_serialization: must be True: pickle is never written.
        """
        if not safe_serialization:
            raise ConfigError(Problem("safe_serialization", False, "pickle is never written; leave it True"))
        folder = _local(save_directory)
        limit = convert_file_size_to_int(max_shard_size)
        away = any(map(has_offloaded_params, model.modules()))
        read = functools.partial(load_offloaded_parameter, model) if away else None
        state = state_of(model) if away else self.get_state_dict(model)
        try:
            if self._gang.rank == 0:
                save_split(folder, state, limit, offloaded=read)
        finally:
            self._gang.barrier()

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write tensors and plain values, on the main process.

        Args:
            obj: a dict of tensors, which becomes one safetensors file; or, where `f` ends in ".json", a nest of tensors
                and plain values (its tensors go into a safetensors file of the same name).
            f: a name that ends in ".safetensors" or ".json".
            safe_serialization: either way pickle is not written.

        Raises:
            ConfigError: another ending. CheckpointError: values that cannot be saved, named.
        """
        path = _local(f)
        if path.suffix not in (".safetensors", ".json"):
            fix = "pickle is never written: end the name in .safetensors (a dict of tensors) or .json (anything plain)"
            raise ConfigError(Problem("f", str(f), fix))
        if self._gang.rank != 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            save_values(path, obj)
        else:
            save_tensors(path, obj)


def _local(folder: str | os.PathLike[str]) -> Path:
    """A folder of this machine.

    Raises:
        ConfigError: it is a URL.
    """
    if is_url(folder):
        fix = "is remote, where checkpoints alone can be written; give a folder of this machine"
        raise ConfigError(Problem("folder", os.fspath(folder), fix))
    return Path(folder).expanduser().absolute()
