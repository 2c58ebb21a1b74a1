"""Tensors that DeepSpeed keeps in files between steps (`"device": "nvme"`), as tensors mapped from those files.

They are saved and loaded through the mapping, so that no rank needs memory for all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from windlass.config.deepspeed import file_folders
from windlass.core.errors import ConfigError, Problem


class SwapFiles:
    """The files of the optimizer's flat tensors: fp32 values of parameters, and the state of each.

    Small ones stay in memory; DeepSpeed decides it.

    Args:
        swapper: DeepSpeed's, which moves them.
    """

    def __init__(self, swapper: Any) -> None:
        self._swapper = swapper
        self._mapped: dict[str, Tensor] = {}

    def kept(self, buffer: Tensor, tensor: Tensor) -> Tensor:
        """The values of `tensor`, which is `buffer` or of its state: mapped from its file, or itself in memory."""
        info = self._info(buffer)
        if info is None or buffer.numel():
            return tensor
        path = next((kept.swap_path for kept in info.tensors if kept.compute_tensor is tensor), None)
        if path is None:
            return tensor
        if path not in self._mapped:
            self._mapped[path] = _mapped(path, info.tensor_numel, info.tensor_dtype)
        return self._mapped[path]

    @contextlib.contextmanager
    def filling(self, buffer: Tensor) -> Iterator[None]:
        """Context in which `buffer` is in memory, without a state; what is its state at the end is written to files."""
        info = self._info(buffer)
        if info is None:
            yield
            return
        info.tensors, info.has_state_tensors = info.tensors[:1], False
        self._swapper.swap_in_optimizer_state(parameter=buffer, async_parameter=None)
        yield
        self._swapper.swap_out_optimizer_state(parameter=buffer, async_swap=False)

    def remove(self) -> None:
        """Remove the files. What was mapped stays readable."""
        shutil.rmtree(self._swapper.swap_folder, ignore_errors=True)

    def _info(self, buffer: Tensor) -> Any:
        return self._swapper.swap_params_info.get(getattr(buffer, "ds_id", None))


def _mapped(path: str, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)


def uses_files(config: Mapping[str, Any]) -> bool:
    """Return True if a configuration keeps tensors in files."""
    return bool(file_folders(config))


def lock_files(config: Mapping[str, Any], rank: int) -> IO[str]:
    """Lock the folder of the files for this rank: DeepSpeed gives the files of any run the same names.

    Raises:
        ConfigError: another run uses it.
    """
    path, folder = file_folders(config)[0]
    Path(folder).mkdir(parents=True, exist_ok=True)
    lock = (Path(folder) / f"windlass-rank{rank}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        fix = "another run, or an earlier Trainer of this process, has its tensors there; give each one of its own"
        raise ConfigError(Problem(f"deepspeed.{path}", folder, fix)) from None
    return lock
