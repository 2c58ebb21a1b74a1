"""Tensors that DeepSpeed keeps in files between steps (`"device": "nvme"`), as tensors mapped from those files.

They are saved and loaded through the mapping, so that no rank needs memory for all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from windlass.config.deepspeed import file_folders, value_at
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.tensors import elements_of
from windlass.core.whole_file import NO_FOLLOW

# Bytes of a rank's part of a parameter from which DeepSpeed keeps it in a file.
_LEAST = 1 << 20


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
        # DeepSpeed leaves a tensor without elements in the place of what it has moved to a file.
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


def check_buffers(module: nn.Module, config: Mapping[str, Any], ranks: int) -> None:
    """Check that the buffers through which DeepSpeed reads parameters from files hold each of them. Raises ConfigError
    if a parameter is too large, or a layer has too many.
    """
    section = value_at(config, "zero_optimization.offload_param")
    size, count = section.get("buffer_size", 100_000_000), section.get("buffer_count", 5)
    path = "deepspeed.zero_optimization.offload_param"
    for name, parameter in module.named_parameters():
        part = -(-elements_of(parameter) // ranks)
        if part > size:
            fix = f"is less than the {part} elements of a rank's part of {name}; set it to {part} or more"
            raise ConfigError(Problem(f"{path}.buffer_size", size, fix))
    for name, layer in module.named_modules():
        at_once = sum(
            elements_of(p) // ranks * p.element_size() >= _LEAST for p in layer.parameters(recurse=False)
        )
        if at_once > count:
            fix = f"is less than the {at_once} large parameters of {name or 'the model'}; set it to {at_once} or more"
            raise ConfigError(Problem(f"{path}.buffer_count", count, fix))


class ParamFiles:
    """The files of the parameters that a rank has parts of, at stage 3.

    Small ones stay in memory; DeepSpeed decides it.

    Args:
        module: divided.

    Raises:
        ModelError: DeepSpeed would round what it keeps in files, or cannot keep all of it there.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._mapped: dict[nn.Parameter, Tensor] = {}
        swappers = {id(swapper): swapper for swapper in map(_swapper_of, module.parameters()) if swapper}
        if len(swappers) > 1:
            raise ModelError(
                "parts of the model were divided while they were built, each into files of its own, of which DeepSpeed "
                'knows one: set "zero3_init_flag": false, or offload_param to cpu'
            )
        for name, parameter in module.named_parameters():
            self._check(name, parameter)

    def _check(self, name: str, parameter: nn.Parameter) -> None:
        swapper = _swapper_of(parameter)
        if swapper is not None and swapper.dtype != parameter.dtype:
            raise ModelError(
                f"{name} is in {parameter.dtype}, and DeepSpeed would keep it in files in {swapper.dtype}: set "
                "offload_param to cpu"
            )

    def kept(self, parameter: Any) -> Tensor:
        """This rank's part of a parameter, mapped from its file, or in memory."""
        swapper = _swapper_of(parameter)
        if swapper is None:
            part: Tensor = parameter.ds_tensor
            return part
        if parameter not in self._mapped:
            path = swapper.get_path(parameter, must_exist=True)
            self._mapped[parameter] = _mapped(path, parameter.ds_tensor.ds_numel, swapper.dtype)
        return self._mapped[parameter]

    def take(self, parameter: Any, buffer: Tensor, offset: int, length: int) -> None:
        """Replace this rank's part of a trained parameter, which has `length` elements and padding, by that of
        `buffer` from `offset` on.
        """
        part, swapper = parameter.ds_tensor, _swapper_of(parameter)
        if swapper is None:
            part.data[:length].copy_(buffer.narrow(0, offset, length))
        else:
            swapper.swap_out_partitioned_params([parameter], [buffer.narrow(0, offset, part.ds_numel)])


def _swapper_of(parameter: Any) -> Any:
    """DeepSpeed's object that keeps the parameter in a file; None if it is in memory."""
    part = getattr(parameter, "ds_tensor", None)
    in_file = getattr(part, "final_location", None) == "nvme"
    return parameter.nvme_swapper if in_file else None


def _mapped(path: str, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)


def lock_files(config: Mapping[str, Any], rank: int) -> contextlib.ExitStack:
    """Lock the folders of the files for this rank, until the result is closed: DeepSpeed gives the files of any run the
    same names. Raises ConfigError if another run uses one of them.
    """
    with contextlib.ExitStack() as locks:
        for folder, path in {folder: path for path, folder in file_folders(config)}.items():
            locks.enter_context(_lock(Path(folder), path, rank))
        return locks.pop_all()


def _lock(folder: Path, path: str, rank: int) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Never removed: another run may have opened it, and would lock a file that has no name any more.
        name = folder / f"windlass-rank{rank}.lock"
        lock: IO[str] = os.fdopen(os.open(name, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666), "w")
    except OSError as error:
        fix = f"cannot be written ({error.strerror}); name a folder on a local disk"
        raise ConfigError(Problem(f"deepspeed.{path}", str(folder), fix)) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        fix = "another run, or an earlier Trainer of this process, has its tensors there; give each one of its own"
        raise ConfigError(Problem(f"deepspeed.{path}", str(folder), fix)) from None
    except OSError as error:
        lock.close()
        fix = f"cannot be locked ({error.strerror}); name a folder on a local disk"
        raise ConfigError(Problem(f"deepspeed.{path}", str(folder), fix)) from None
    return lock
