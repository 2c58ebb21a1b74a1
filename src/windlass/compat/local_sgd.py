"""Local SGD: processes update on their own, and average their weights every few updates.

Zhang et al., arXiv:1606.07365; Stich, arXiv:1805.09767.
"""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch
from torch import nn

from windlass.accelerator.accelerator import Accelerator
from windlass.core.errors import ConfigError, Problem
from windlass.dist.operations import reduce


class LocalSGD:
    """Around a training loop, with `step()` after every update: `with LocalSGD(accelerator, model, 8) as local: ...`.

    Gradients are not reduced inside; weights are averaged every `local_sgd_steps` calls of `step` and at the end. What
    the optimizer remembers stays each process's own.

    Args:
        accelerator: the one that prepared the model.
        model: as `prepare` returned it.
        local_sgd_steps: updates between two averages.
        enabled: False does nothing, and gradients are reduced in every update as usual.

    Raises:
        ConfigError: the model is sharded, so that no process has weights of its own to average.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ConfigError(Problem("local_sgd_steps", local_sgd_steps, "must be at least 1"))
        if enabled and accelerator.distributed_type == "FSDP":
            fix = "needs whole weights on every process; train without fsdp, or set enabled=False"
            raise ConfigError(Problem("LocalSGD", "a sharded model", fix))
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
        # After an error the others may not come to average, and waiting for them would hide it.
        if self.enabled and error is None:
            self._average()

    def step(self) -> None:
        """One update was made; average if it is time."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self._every == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self._model.parameters():
            parameter.copy_(reduce(parameter))
