"""The engine of an `Accelerator`: a user's own loop (`own_loop.py`), or a run of a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from windlass.accelerator.device_cache import clear_device_cache
from windlass.accelerator.prepared_schedule import PreparedSchedule
from windlass.config.plan import DistPlan
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.data.dealt_loader import DealtLoader
from windlass.transforms.strategy import Strategy


class LoopEngine(Protocol):
    """The owner of the updates: normalizes losses, and may have models of its own."""

    @property
    def dist(self) -> DistPlan:
        """How models are spread over processes."""
        ...

    @property
    def strategies(self) -> Sequence[Strategy]:
        """The strategies of the engine's own models, beside the prepared ones."""
        ...

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was skipped because fp16 gradients overflowed."""
        ...

    def keeps(self, item: Any, prepares: Callable[[torch.optim.Optimizer], bool]) -> bool:
        """Return True if the engine prepares `item` itself, so that `prepare` returns it unchanged.

        Args:
            prepares: returns True if an optimizer updates a model that the script prepares.
        """
        ...

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Compute the gradients of a micro-batch's loss, normalized by the engine's rules."""
        ...

    def free_memory(self) -> None:
        """Free cached device memory; a user's own loop forgets its prepared objects too."""
        ...

    @property
    def saves_loaders(self) -> bool:
        """Whether a saved state holds where prepared loaders are."""
        ...

    def check_may_save(self) -> None:
        """Check that `save_state` may be called.

        Raises:
            ConfigError: the engine saves its state itself.
        """
        ...


class TrainerEngine:
    """Implements `LoopEngine` for a Trainer, whose runs attach to it one after the other.

    Models that a script prepares beside the trained one belong to the accelerator, and are not affected by runs.

    Args:
        owned: the Trainer's own model, wrapper, optimizer and schedule at this moment.
        dist: how the Trainer spreads models, from its arguments at this moment.
        autocast: returns the mixed-precision context of a forward.

    Attributes:
        step_was_skipped: set by the run after each update.
    """

    saves_loaders = False  # a run saves where its own loader is

    def __init__(
        self,
        owned: Callable[[], Iterable[Any]],
        dist: Callable[[], DistPlan],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.step_was_skipped = False
        self._owned, self._dist, self.autocast = owned, dist, autocast
        self._backward: Callable[[Any], None] = _outside
        self._strategies: tuple[Strategy, ...] = ()

    def attach(self, backward: Callable[[Any], None], strategy: Strategy) -> None:
        """A run starts.

        Args:
            backward: called for `accelerator.backward(loss)`.
            strategy: strategy of the trained model; `get_state_dict` and others use it after the run, too.
        """
        self._backward, self._strategies = backward, (strategy,)

    def detach(self) -> None:
        """The run is over."""
        self._backward = _outside

    @property
    def dist(self) -> DistPlan:
        return self._dist()

    @property
    def strategies(self) -> Sequence[Strategy]:
        return self._strategies

    def keeps(self, item: Any, prepares: Callable[[torch.optim.Optimizer], bool]) -> bool:
        if isinstance(item, nn.Module):
            return any(item is own for own in self._owned())
        if isinstance(item, torch.optim.Optimizer):
            return not prepares(item)
        if isinstance(item, LRScheduler | PreparedSchedule):
            return self.keeps(item.optimizer, prepares)
        # The Trainer has dealt these to the processes; a plain DataLoader of a script's is dealt like any other.
        return isinstance(item, DealtLoader)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        self._backward(loss)

    def free_memory(self) -> None:
        # A run calls this between updates: collecting garbage would take longer than it is worth.
        clear_device_cache()

    def check_may_save(self) -> None:
        fix = "the Trainer saves its run itself: save_strategy, save_steps, trainer.save_model()"
        raise ConfigError(Problem("accelerator", "trainer.accelerator", fix))


def _outside(loss: Any) -> None:
    raise ModelError("accelerator.backward(loss) was called outside a training step of the Trainer")
