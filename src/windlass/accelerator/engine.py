"""The engine of an `Accelerator`: a user's own loop (`own_loop.py`), or a run of a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from windlass.accelerator.device_cache import clear_device_cache
from windlass.accelerator.prepared_schedule import PreparedSchedule
from windlass.config.plan import DistPlan
from windlass.core.errors import ModelError
from windlass.core.types import State
from windlass.data.dealt_loader import DealtLoader
from windlass.engine.executor import Executor
from windlass.engine.normalise import UpdateNormaliser
from windlass.transforms.strategy import Strategy


class LoopEngine(Protocol):
    """Normalizes losses and owns the updates; may have its own models."""

    strategies: Sequence[Strategy]  # the strategies of the engine's own models, which are not prepared ones
    saves_state: bool  # True if `save_state` saves the loop; False if the engine saves its own state

    @property
    def dist(self) -> DistPlan:
        """How models are spread over processes."""

    @property
    def step_was_skipped(self) -> bool:
        """True if the last update was skipped because fp16 gradients overflowed."""

    def keeps(self, item: Any, prepares: Callable[[torch.optim.Optimizer], bool]) -> bool:
        """Return True if the engine prepares `item` itself, so that `prepare` returns it unchanged. `prepares` returns
        True if an optimizer updates a model that the script prepares.
        """

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Compute the gradients of a micro-batch's loss, normalized by the engine's rules."""

    def use_learning_rate(self, rate: float) -> None:
        """Use this learning rate in the next backward, for an optimizer that updates in it. Raises ConfigError if there
        is no such optimizer.
        """

    def state_dict(self) -> State:
        """What the loop's next update is computed with, besides the prepared objects."""

    def load_state_dict(self, state: State) -> None: ...

    def free_memory(self) -> None:
        """Free cached device memory; a user's own loop releases its prepared objects too."""


class TrainerEngine:
    """Implements `LoopEngine` for a Trainer, whose runs attach to it one after the other.

    Other models that a script prepares belong to the accelerator and are not affected by runs.

    Args:
        owned: the Trainer's own model, wrapper, optimizer and schedule at this moment.
        dist: how the Trainer spreads models, from its arguments at this moment.
        autocast: returns the mixed-precision context of a forward.

    Attributes:
        step_was_skipped: set by the run after each update.
        backward: that of the normaliser of the run, for its executor.
    """

    saves_state = False

    def __init__(
        self,
        owned: Callable[[], Iterable[Any]],
        dist: Callable[[], DistPlan],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.step_was_skipped = False
        self._owned, self._dist, self.autocast = owned, dist, autocast
        self.backward: Callable[..., None] = _refuse_backward
        self.strategies: Sequence[Strategy] = ()

    def attach(self, normaliser: UpdateNormaliser, executor: Executor) -> None:
        """Start a run, with what normalizes its losses and computes gradients. The strategy of the executor is used
        after the run, too.
        """
        self.backward, self.strategies = partial(normaliser.backward, executor=executor), (executor.strategy,)

    def detach(self) -> None:
        """End the run."""
        self.backward = _refuse_backward

    @property
    def dist(self) -> DistPlan:
        return self._dist()

    def keeps(self, item: Any, prepares: Callable[[torch.optim.Optimizer], bool]) -> bool:
        if isinstance(item, nn.Module):
            return any(item is own for own in self._owned())
        if isinstance(item, torch.optim.Optimizer):
            return not prepares(item)
        if isinstance(item, LRScheduler | PreparedSchedule):
            return self.keeps(item.optimizer, prepares)
        # The Trainer has distributed these; a plain DataLoader of a script is prepared like any other.
        return isinstance(item, DealtLoader) and item.is_dealt

    def use_learning_rate(self, rate: float) -> None:
        """Nothing to do: the schedule of the run has set it."""

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        """A run saves its state itself."""

    def free_memory(self) -> None:
        # Runs call this between updates, where a garbage collection would take too long.
        clear_device_cache()


def _refuse_backward(loss: Any, **_: Any) -> None:
    raise ModelError("accelerator.backward(loss) was called outside a training step of the Trainer")
