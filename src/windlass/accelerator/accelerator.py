"""The device, the ranks and the backward of a run, under the names that scripts know from a user-owned loop.

First form: what `trainer.accelerator` offers inside hooks and callbacks. Preparing objects for a loop of one's own
(`prepare`, `accumulate`, `save_state`, ...) is not built yet, and says so by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.plan import PrecisionPlan
from windlass.core.errors import ModelError
from windlass.dist.gang import Gang, leave
from windlass.metrics.gather import ProcessGroupGather, SoloGroup
from windlass.precision.autocast import autocast_context
from windlass.transforms.ddp import Replicated

_NOT_BUILT = frozenset(
    [
        "prepare",
        "prepare_model",
        "prepare_data_loader",
        "prepare_optimizer",
        "prepare_scheduler",
        "accumulate",
        "no_sync",
        "save_state",
        "load_state",
        "trigger_sync_in_backward",
        "join_uneven_inputs",
        "clip_grad_norm_",
        "clip_grad_value_",
        "unscale_gradients",
        "lomo_backward",
        "set_trigger",
        "check_trigger",
        "reduce",
        "pad_across_processes",
        "split_between_processes",
        "init_trackers",
        "get_tracker",
        "log",
        "save",
        "save_model",
        "register_save_state_pre_hook",
        "register_load_state_pre_hook",
        "register_for_checkpointing",
        "get_state_dict",
        "skip_first_batches",
        "profile",
        "maybe_context_parallel",
        "deepspeed_ulysses_dl_adapter",
        "verify_device_map",
    ]
)


class Accelerator:
    """Where a run happens.

    Attributes:
        device: the device of this process.
        num_processes, process_index, local_process_index: size and ranks of the job.
        mixed_precision: "no", "bf16" or "fp16".
        gradient_accumulation_steps: micro-batches of one update.
        sync_gradients: whether the current micro-batch is the last one of its update.
    """

    @classmethod
    def of_run(
        cls, gang: Gang, device: torch.device, precision: PrecisionPlan, accumulation: int = 1
    ) -> Accelerator:
        """The accelerator of a Trainer's run, which has met its world and resolved its settings already."""
        return cls(gang, device, precision, accumulation)

    def __init__(
        self, gang: Gang, device: torch.device, precision: PrecisionPlan, accumulation: int = 1
    ) -> None:
        self._gang = gang
        self.device = device
        self._precision = precision
        self.mixed_precision = {"fp32": "no"}.get(precision.compute, precision.compute)
        self.gradient_accumulation_steps = accumulation
        self.sync_gradients = True
        self.optimizer_step_was_skipped = False
        self._backward: Callable[[Any], None] | None = None

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_BUILT:
            raise AttributeError(
                f"Accelerator.{name} is not built yet: user-owned loops are not supported in this version"
            )
        raise AttributeError(f"'Accelerator' object has no attribute {name!r}")

    # --- ranks ------------------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        return self._gang.size

    @property
    def process_index(self) -> int:
        return self._gang.rank

    @property
    def local_process_index(self) -> int:
        return self._gang.world.local_rank

    @property
    def is_main_process(self) -> bool:
        return self._gang.world.is_main

    @property
    def is_local_main_process(self) -> bool:
        return self._gang.world.is_local_main

    @property
    def is_last_process(self) -> bool:
        return self._gang.rank == self._gang.size - 1

    def wait_for_everyone(self) -> None:
        self._gang.barrier()

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the body first, the others when it is done."""
        if not self.is_main_process:
            self._gang.barrier()
        try:
            yield
        finally:
            if self.is_main_process:
                self._gang.barrier()

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: the function runs on the main process, and gives None elsewhere."""
        return function if self.is_main_process else (lambda *_, **__: None)

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_local_main_process:
            print(*args, **kwargs)

    # --- work -------------------------------------------------------------------------------------------------------

    def bind_backward(self, backward: Callable[[Any], None] | None) -> None:
        """Say what `backward` does while a run is under way; None when it is over."""
        self._backward = backward

    def backward(self, loss: Any) -> None:
        """Gradients of a micro-batch's loss (a scalar tensor, or `LossTerms`), normalised, scaled and reduced as the
        run asks.

        Raises:
            ModelError: no update is under way.
        """
        if self._backward is None:
            raise ModelError("accelerator.backward(loss) was called outside a training step of the Trainer")
        self._backward(loss)

    def autocast(self) -> AbstractContextManager[Any]:
        """The mixed-precision context of this run."""
        return autocast_context(self._precision, self.device)()

    def gather(self, tensor: Tensor) -> Tensor:
        """This tensor from every rank, joined along the first axis, on this rank's device. Sizes may differ."""
        group = SoloGroup() if self._gang.host_group is None else ProcessGroupGather(self._gang.host_group)
        parts: list[Tensor] = []
        for _, _, part in group.stream([tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()]):
            parts.append(part)
        return torch.cat([part.to(tensor.device) for part in parts])

    gather_for_metrics = gather

    def unwrap_model(self, model: nn.Module, **_: Any) -> nn.Module:
        """The user's own module behind wrappers."""
        return model.module if isinstance(model, Replicated) else model

    def free_memory(self) -> None:
        """Hand cached device memory back to the system."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def end_training(self) -> None:
        """Close the process group."""
        leave()
