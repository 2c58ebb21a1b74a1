"""The accumulation state of a loop: its loader, and whether its current micro-batch completes an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from windlass.config.plugins import GradientAccumulationPlugin
from windlass.data.prepared_loader import PreparedLoader


class AccumulationState:
    """Counts micro-batches, and tracks which prepared loaders are being iterated.

    Attributes:
        sync_gradients: the current micro-batch is the last one of its update.
        step: micro-batches since the last loader ended.
        plugin: options of gradient accumulation.
        at_begin: called at the start of each pass over a loader.
        stride: number of batches of the unprepared loader that make one full batch over all processes.
        models: the models that the current micro-batch accumulates into.
    """

    def __init__(self, plugin: GradientAccumulationPlugin, stride: int = 1) -> None:
        self.plugin = plugin
        self.stride = stride
        self.models: tuple[nn.Module, ...] = ()
        self._covered: int | None = None
        self.sync_gradients = True
        self.step = 0
        self.at_begin: Callable[[], None] = lambda: None
        self._loaders: list[PreparedLoader] = []

    # --- the loaders under way ----------------------------------------------------------------------------------------

    def begin(self, loader: PreparedLoader) -> None:
        """A pass over `loader` starts, perhaps nested in another pass."""
        self.at_begin()
        self._loaders.append(loader)

    def end(self, loader: PreparedLoader) -> None:
        """A pass over `loader` has ended, or was left early."""
        for index in reversed(range(len(self._loaders))):
            if self._loaders[index] is loader:
                del self._loaders[index]
                return

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The innermost loader that is being iterated."""
        return self._loaders[-1] if self._loaders else None

    @property
    def in_dataloader(self) -> bool:
        return bool(self._loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """The current batch is the last one of its pass."""
        return bool(self._loaders) and self._loaders[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples over all ranks of the last, short batch; 0 if it is full, -1 if that is unknown."""
        return self._loaders[-1].remainder if self._loaders else -1

    # --- the updates --------------------------------------------------------------------------------------------------

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        return self.plugin.to_kwargs()

    @property
    def num_steps(self) -> int:
        """Micro-batches of an update."""
        return self.plugin.num_steps or 1

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.plugin.num_steps = value

    @property
    def adjust_scheduler(self) -> bool:
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        return self.plugin.sync_with_dataloader

    def advance(self) -> None:
        """Start the next micro-batch, and determine whether it completes an update."""
        self._covered = self._stands_for() + (0 if self.sync_gradients else self._covered or 0)
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0

    def batches_of_update(self) -> int:
        """Number of batches of the unprepared loader that the current update covers, divided by its micro-batches:
        `stride` for a full update, fewer if its last batch is short.
        """
        if self._covered is None:  # the loop does not accumulate
            return self._stands_for()
        return -(-self._covered // self.num_steps)

    def _stands_for(self) -> int:
        loader = self.active_dataloader
        whole = None if loader is None else loader.total_batch_size
        if loader is None or not whole:
            return self.stride
        return -(-loader.samples_everywhere * self.stride // whole)

    def reset(self) -> None:
        """Return to the initial state."""
        self._covered = None
        self.step, self.sync_gradients = 0, True
        self._loaders = []
