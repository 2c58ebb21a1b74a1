"""Names that scripts import, each a line or a few: parts of collators, default callbacks, words for levels and consent,
seeds of workers, lengths, signatures, the order of processes, questions about engines.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from windlass.config.enums import Choice
from windlass.config.kinds import flag
from windlass.core.logs import get_logger, log_levels
from windlass.core.optional import is_imported
from windlass.core.rng import set_seed
from windlass.data.collate_pad import Framework, default_data_collator, pad_quietly
from windlass.data.columns import ColumnCollator

_logger = get_logger(__name__)

trainer_log_levels = {**log_levels, "passive": -1}  # "passive" leaves the level as it is
InputDataClass = Any
DataCollator = Callable[[list[Any]], Any]
DataCollatorMixin = Framework
pad_without_fast_tokenizer_warning = pad_quietly


def torch_default_data_collator(features: list[Any]) -> dict[str, Any]:
    """Samples stacked to a batch of tensors."""
    return default_data_collator(features, "pt")


def numpy_default_data_collator(features: list[Any]) -> dict[str, Any]:
    """Samples stacked to a batch of arrays."""
    return default_data_collator(features, "np")


def to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """A tensor, or anything that numpy takes, as an array on the host."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)


def is_fsdp_managed_module(module: nn.Module) -> bool:
    """Whether a module's parameters lie in shards on several processes."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


@contextlib.contextmanager
def torch_distributed_zero_first(local_rank: int) -> Iterator[None]:
    """Let the process of local rank 0 run the body first, then the others; -1 is a process by itself.

    `TrainingArguments.main_process_first` does the same and raises an error on the others if the first one fails.
    """
    if local_rank > 0:
        dist.barrier()
    try:
        yield
    finally:  # the others wait for the first one, whatever was raised
        if local_rank == 0:
            dist.barrier()


def is_main_process(local_rank: int) -> bool:
    """Whether this local rank is that of the first process; -1 is a process by itself."""
    return local_rank in (-1, 0)


def total_processes_number(local_rank: int) -> int:
    """How many processes the job has; 1 if `local_rank` is -1, a process by itself."""
    return 1 if local_rank == -1 else dist.get_world_size()


class FSDPOption(Choice):
    """Words of `TrainingArguments(fsdp=...)` in older scripts."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    OFFLOAD = "offload"
    AUTO_WRAP = "auto_wrap"


class RemoveColumnsCollator(ColumnCollator):
    """Leaves out the columns that a model does not take, before samples are collated.

    Args:
        data_collator: list of samples -> batch.
        signature_columns: the columns to keep.
        logger: the logger that names the columns that are left out, once; by default that of Windlass.
        model_name: kept for scripts that pass it.
        description: which set it is, for the message ("training").
    """

    def __init__(
        self,
        data_collator: Callable[[list[Any]], Any],
        signature_columns: Iterable[str],
        logger: Any = None,
        model_name: str | None = None,
        description: str | None = None,
    ) -> None:
        options = {} if logger is None else {"log": logger}
        super().__init__(data_collator, list(signature_columns), description or "training", **options)
        self.data_collator, self.signature_columns = self.collate, self.columns
        self.model_name, self.description = model_name, description


def str_to_bool(value: str, to_bool: bool = True) -> int | bool:
    """True or False for a word of consent or refusal, in any case; with `to_bool=False`, 1 or 0. Raises ValueError if
    it is neither.
    """
    said = flag(value)
    return said if to_bool else int(said)


def has_length(dataset: Any) -> bool:
    """Whether `len(dataset)` works."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError):
        return False


def number_of_arguments(func: Callable[..., Any]) -> int:
    """How many arguments a function takes; of a partial one, how many are left."""
    if isinstance(func, functools.partial):
        return len(inspect.signature(func.func).parameters) - len(func.args) - len(func.keywords)
    return len(inspect.signature(func).parameters)


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seed a data worker of a process, for `DataLoader(worker_init_fn=...)`. The Trainer's workers need none."""
    set_seed(num_workers * rank + torch.initial_seed() % 2**32)


def reissue_pt_warnings(caught_warnings: Iterable[Any]) -> None:
    """Give caught warnings again, if there are several, but for PyTorch's (UserWarning)."""
    caught = list(caught_warnings)
    for warning in caught if len(caught) > 1 else ():
        if warning.category is not UserWarning:
            warnings.warn(warning.message, warning.category, stacklevel=2)


@contextlib.contextmanager
def suppress_progress_bars() -> Iterator[None]:
    """No progress bars of huggingface_hub in the body, if a script has imported it."""
    hub = sys.modules["huggingface_hub"].utils if is_imported("huggingface_hub") else None
    if hub is not None:
        hub.disable_progress_bars()
    try:
        yield
    finally:
        if hub is not None:
            hub.enable_progress_bars()


def set_rng_state_for_device(
    device_name: str, device_module: Any, checkpoint_rng_state: Mapping[str, Any], is_distributed: bool
) -> None:
    """Set the random state of a kind of device; an error is logged and does not stop the script.

    Args:
        device_name: "CUDA", ...: in lower case, the key of its state.
        device_module: `torch.cuda`, ...
        checkpoint_rng_state: states by key.
        is_distributed: the state is a list, one for each device.
    """
    try:
        state = checkpoint_rng_state[device_name.lower()]
        random = device_module.random
        (random.set_rng_state_all if is_distributed else random.set_rng_state)(state)
    except Exception as error:
        _logger.error(
            "the random state of %s could not be set, so random numbers differ: %r", device_name, error
        )
