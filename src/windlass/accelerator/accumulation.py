"""The accumulation state of a loop: its active loaders, and if its current micro-batch completes an update."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, Protocol

from torch import nn

from windlass.config.loop_options import GradientAccumulationPlugin
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger, warn_once

_log = get_job_logger(__name__)


class ActiveLoader(Protocol):
    """A loader during its pass: a `PreparedLoader`, or one that a script wrote."""

    @property
    def batch_size(self) -> int | None: ...
    @property
    def total_batch_size(self) -> int | None:
        """Samples of a whole batch over all ranks; None if unknown."""

    @property
    def samples_here(self) -> int | None:
        """Samples of this rank in the current batch; None if unknown."""

    @property
    def samples_everywhere(self) -> int | None:
        """Samples of all ranks in the current batch; None if unknown."""

    @property
    def is_filler(self) -> bool: ...
    @property
    def end_of_dataloader(self) -> bool: ...
    @property
    def remainder(self) -> int: ...


class AccumulationState:
    """Counts micro-batches, and tracks the prepared loaders that are being iterated.

    Attributes:
        sync_gradients: the current micro-batch is the last one of its update.
        step: micro-batches since the last loader ended.
        plugin: options of gradient accumulation.
        at_begin: called at the start of each pass over a loader.
        stride: number of batches of the unprepared loader in one full batch over all processes.
        micro_batches: those of the current update; 0 if it is not known yet.
        models: the models that the current micro-batch accumulates into.
    """

    def __init__(self, plugin: GradientAccumulationPlugin, stride: int = 1) -> None:
        self.plugin = plugin
        self.stride = stride
        self.models: tuple[nn.Module, ...] = ()
        self.micro_batches = 0
        self._covered: int | None = None
        self.sync_gradients = True
        self.step = 0
        self.at_begin: Callable[[], None] = lambda: None
        self._loaders: list[ActiveLoader] = []

    def __reduce__(self) -> Any:
        # A copy of a prepared object follows no loop: its micro-batches are whole updates.
        return AccumulationState, (self.plugin, self.stride)

    # --- the active loaders -------------------------------------------------------------------------------------------

    def begin(self, loader: ActiveLoader) -> None:
        """Start a pass over `loader`, which may be nested in another pass."""
        self.at_begin()
        self._loaders.append(loader)

    def turn_to(self, loader: ActiveLoader) -> None:
        """Make `loader`, whose pass has begun, that of the current batch. Endless generators over loaders take turns:
        the pass that began last need not be the one that goes on, and gradients are weighted by its shares.
        """
        if self._loaders and self._loaders[-1] is not loader:
            self.end(loader)
            self._loaders.append(loader)

    def end(self, loader: ActiveLoader) -> None:
        """End a pass over `loader`."""
        # Not the innermost in any case: a pass that was left early ends when its generator is closed, perhaps in a
        # later one.
        for index in reversed(range(len(self._loaders))):
            if self._loaders[index] is loader:
                del self._loaders[index]
                return

    @property
    def active_dataloader(self) -> ActiveLoader | None:
        """The innermost loader that is being iterated."""
        return self._loaders[-1] if self._loaders else None

    @property
    def in_dataloader(self) -> bool:
        return bool(self._loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """True if the current batch is the last one of its pass."""
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
        # A script may have divided, and 4.0 is a whole number.
        if not isinstance(value, Real) or value < 1 or value % 1:
            fix = "must be a whole number above 0"
            raise ConfigError(Problem("gradient_accumulation_steps", value, fix))
        self.plugin.num_steps = int(value)

    @property
    def adjust_scheduler(self) -> bool:
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        return self.plugin.sync_with_dataloader

    def advance(self) -> None:
        """Start the next micro-batch, and determine whether it completes an update."""
        # Batches of the update so far. `sync_gradients` is still that of the micro-batch before: True ended an update.
        self._covered = self._loader_batches() + (0 if self.sync_gradients else self._covered or 0)
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0

    def warn_of_partial_clip(self) -> None:
        """Say once that gradients are clipped before their update is complete, as they are in this micro-batch."""
        if not self.sync_gradients:
            warn_once(
                _log,
                "gradients are clipped in a micro-batch that does not complete its update: only a part of them is "
                "scaled, and on several processes each scales its own by another factor. Clip `if "
                "accelerator.sync_gradients`.",
            )

    def batches_of_update(self) -> int:
        """Number of batches of the unprepared loader that the current update covers, divided by its micro-batches:
        `stride` for a full update, fewer if its last batch is short.
        """
        if self._covered is None:  # the loop does not accumulate
            return self._loader_batches()
        return -(-self._covered // self.num_steps)

    def _loader_batches(self) -> int:
        loader = self.active_dataloader
        whole = None if loader is None else loader.total_batch_size
        samples = None if loader is None else loader.samples_everywhere
        if samples is None or not whole:
            return self.stride
        return -(-samples * self.stride // whole)

    def resume(self, step: int) -> None:
        """Begin an update, `step` micro-batches after the last loader ended."""
        self._covered = None
        self.step, self.sync_gradients = step, True

    def reset(self) -> None:
        """Return to the initial state."""
        self.resume(0)
        self._loaders = []
