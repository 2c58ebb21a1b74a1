"""Exchange tensors and values between processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.accelerator.accumulation import AccumulationState, ActiveLoader
from windlass.core.trees import recursively_apply
from windlass.dist import operations
from windlass.dist.gang import Gang


class Exchange:
    """Gathers, reduces and pads tensors over processes.

    Args:
        accumulation: has the loader that is being iterated.

    Attributes:
        flag: 1 if this process has set its trigger.
    """

    def __init__(self, gang: Gang, accumulation: AccumulationState) -> None:
        self._gang, self._accumulation = gang, accumulation
        self.flag: Tensor | None = None

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes along the first axis. Sizes along it may differ."""
        return operations.gather(tensor, gang=self._gang)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather` with exactly one row for each sample of the current batch. Rows of a filler batch are dropped.

        If the last batch is short, a tensor with the rows of a full batch (a loss repeated for each sample) is cut to
        the samples of the batch.

        Args:
            input_data: a nest of tensors, or a list of plain values.
            use_gather_object: gather as objects even if all values are tensors.
        """
        loader = self._accumulation.active_dataloader
        if use_gather_object or not _all_tensors(input_data):
            own = input_data if loader is None or not loader.is_filler else type(input_data)()
            if self._gang.size == 1:
                return own
            return [item for part in self._gang.gather_objects(own) for item in part]
        # If a stream ends earlier on this process than on others, it has fillers before the last batch too.
        if loader is not None and (loader.end_of_dataloader or loader.is_filler):
            input_data = recursively_apply(lambda tensor: _of_samples(tensor, loader), input_data)
        gathered = self.gather(input_data)
        if loader is None or loader.samples_here is not None or not loader.end_of_dataloader:
            return gathered
        # A script's own loader: only the number of samples over all processes is known.
        kept = loader.remainder if loader.remainder > 0 else None
        return recursively_apply(lambda tensor: tensor[:kept] if tensor.ndim else tensor, gathered)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce each tensor over all processes, and multiply the result by `scale`.

        Args:
            reduction: "sum", "mean" or "max".
        """
        return operations.reduce(tensor, reduction, scale, gang=self._gang)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad axis `dim` of each tensor to its largest size on any process."""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first, gang=self._gang)

    # --- triggers -----------------------------------------------------------------------------------------------------

    def set_trigger(self) -> None:
        """Set this process's trigger."""
        self.flag = torch.tensor(1)

    def check_trigger(self) -> bool:
        """Return True if any process has set its trigger, and reset all triggers then. Collective."""
        raised = self._gang.sum(torch.tensor(0) if self.flag is None else self.flag.clone())
        if int(raised) == 0:
            return False
        self.flag = None
        return True


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _of_samples(tensor: Tensor, loader: ActiveLoader) -> Tensor:
    """The rows of `tensor` that belong to samples of this process."""
    if loader.is_filler:
        return tensor.reshape(1)[:0] if tensor.ndim == 0 else tensor[:0]
    here = loader.samples_here
    if here is not None and tensor.ndim and tensor.shape[0] == loader.batch_size and here < tensor.shape[0]:
        return tensor[:here]
    return tensor
