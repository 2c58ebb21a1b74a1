"""Files that a script writes outside of checkpoints: a model's weights, tensors and plain values."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from torch import nn

from windlass.accelerator.offloaded_weights import (
    get_state_dict_offloaded_model,
    has_offloaded_params,
    load_offloaded_parameter,
)
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.value_files import save_values
from windlass.checkpoint.split import save_split
from windlass.config.quantities import convert_file_size_to_int
from windlass.core.errors import ConfigError, Problem
from windlass.core.locations import is_url
from windlass.core.logs import get_logger, warn_once
from windlass.core.module_state import state_of
from windlass.dist.gang import Gang

_log = get_logger(__name__)


class ModelFiles:
    """Reads state dicts of models, and writes single files; see the methods of `Accelerator`."""

    def __init__(self, all_ranks: Gang, prepared: Prepared) -> None:
        self._all_ranks, self._prepared = all_ranks, prepared

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state dict with whole tensors. Collective."""
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
        """Write the model's weights as safetensors files that `from_pretrained` reads. Collective."""
        warn_if_unsafe(safe_serialization)
        folder = _local(save_directory)
        limit = convert_file_size_to_int(max_shard_size)
        away = any(map(has_offloaded_params, model.modules()))
        read = functools.partial(load_offloaded_parameter, model) if away else None
        state = state_of(model) if away else self.get_state_dict(model)
        try:
            if self._all_ranks.rank == 0:
                save_split(folder, state, limit, offloaded=read)
        finally:
            self._all_ranks.barrier()

    def save(self, obj: Any, f: str | os.PathLike[str]) -> None:
        """Write tensors and plain values, on the main process."""
        path = _local(f)
        if self._all_ranks.rank == 0:
            save_values(path, obj)


def warn_if_unsafe(safe_serialization: bool) -> None:
    """Warn once that `safe_serialization=False` is mapped to True."""
    if not safe_serialization:
        warn_once(_log, "safe_serialization=False has no effect: safetensors are written, never pickle")


def _local(folder: str | os.PathLike[str]) -> Path:
    if is_url(folder):
        fix = "is remote, where checkpoints alone can be written; use a folder of this machine"
        raise ConfigError(Problem("folder", os.fspath(folder), fix))
    return Path(folder).expanduser().absolute()
