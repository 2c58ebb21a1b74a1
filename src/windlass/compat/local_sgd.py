"""Local SGD: processes update independently, and average their weights every few updates.

Zhang et al., arXiv:1606.07365; Stich, arXiv:1805.09767.
"""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch
from torch import nn

from windlass.accelerator.accelerator import Accelerator
from windlass.core.errors import ConfigError, Problem
from windlass.dist.gang import current
from windlass.dist.operations import reduce


class LocalSGD:
    """Context of a loop that calls `local.step()` after each update: `with LocalSGD(accelerator, model, 8) as local:`.

    Gradients are not reduced. Weights are averaged every `local_sgd_steps` calls of `step`, and at the end. Optimizer
    states are not averaged.

    Args:
        accelerator: the one that prepared the model.
        model: as returned by `prepare`.
        local_sgd_steps: updates between two averages.
        enabled: False does nothing; gradients are reduced in every update.

    Raises:
        ConfigError: processes divide the model, so none has whole weights to average.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ConfigError(Problem("local_sgd_steps", local_sgd_steps, "must be at least 1"))
        if enabled and accelerator.distributed_type in ("FSDP", "DEEPSPEED"):
            fix = "needs whole weights on every process; train without it, or set enabled=False"
            raise ConfigError(Problem("LocalSGD", str(accelerator.distributed_type), fix))
        axes = current().mesh.used()
        if enabled and axes.keys() - {"replicate"}:
            # Ranks along such an axis have other parts of the model, or gradients of other parts of a sample.
            fix = "needs whole weights on every process; leave parallelism_config out, or set enabled=False"
            raise ConfigError(Problem("LocalSGD", axes, fix))
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self._accelerator, self._model, self._every = accelerator, model, local_sgd_steps
        self._unsynchronised = contextlib.ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._unsynchronised.enter_context(self._accelerator.no_sync(self._model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsynchronised.close()
        # After an error, other processes may not call this, and waiting for them would hide the error.
        if self.enabled and error is None:
            self._average()

    def step(self) -> None:
        """Count an update, and average the weights every `local_sgd_steps` updates."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self._every == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        # Parameters alone, as in accelerate: each process keeps the running statistics of its own samples.
        for parameter in self._model.parameters():
            parameter.copy_(reduce(parameter))
