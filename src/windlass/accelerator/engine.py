"""What makes the updates of an accelerator: a loop of the user's own, whose losses it divides, or a Trainer's runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.device_cache import clear_device_cache
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.prepared_schedule import PreparedSchedule
from windlass.config.plan import DistPlan
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.types import State
from windlass.data.dealt_loader import DealtLoader
from windlass.dist.beacon import AFTER, beacon
from windlass.dist.gang import Gang
from windlass.engine.executor import Executor
from windlass.engine.normalise import LoopNormaliser, MicroBatch, UpdateNormaliser
from windlass.transforms.alone import Alone
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


class OwnLoop:
    """Implements `LoopEngine` for a script that calls forward, backward and step itself."""

    strategies: Sequence[Strategy] = ()
    saves_state = True

    def __init__(
        self, dist: DistPlan, data_ranks: Gang, accumulation: AccumulationState, prepared: Prepared
    ) -> None:
        self.dist, self._accumulation, self._prepared = dist, accumulation, prepared
        self._normaliser = LoopNormaliser(data_ranks.size, data_ranks.sum_on_device)

    @property
    def step_was_skipped(self) -> bool:
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    def keeps(self, item: Any, prepares: Callable[[torch.optim.Optimizer], bool]) -> bool:
        return False

    def backward(self, loss: Any, **kwargs: Any) -> None:
        beacon().call("backward")
        micro, executor = self._micro_batch(), self._prepared.executor
        self._normaliser.scope(micro)
        share = self._normaliser.apply(loss)
        executor.backward_in_loop(share, last=micro.last, discards=self._prepared.discards, **kwargs)
        factor = self._normaliser.correction()
        if factor is not None:
            self._correct(executor, factor)
        beacon().call(f"{AFTER}backward")

    def use_learning_rate(self, rate: float) -> None:
        fused = self._prepared.fused
        if fused is None:
            fix = (
                "no prepared optimizer updates in the backward (Lomo, AdaLomo): leave it out, and call step()"
            )
            raise ConfigError(Problem("learning_rate", rate, fix))
        for group in fused.optimizer.param_groups:
            group["lr"] = rate

    def _micro_batch(self) -> MicroBatch:
        accumulation, loader = self._accumulation, self._accumulation.active_dataloader
        here = None if loader is None else loader.samples_here
        everywhere = None if loader is None else loader.samples_everywhere
        return MicroBatch(
            accumulation.num_steps, accumulation.sync_gradients, here, everywhere, bool(accumulation.models)
        )

    def _correct(self, executor: Executor, factor: Tensor) -> None:
        """Multiply the gradients of the models that the update accumulated into."""
        if executor.updates_in_backward:
            raise ModelError(
                "LossTerms over several micro-batches are corrected after the last one, but the optimizer updates in "
                "the backward: pass their mean, or set gradient_accumulation_steps=1"
            )
        for model in self._accumulation.models:
            strategy = self._prepared.strategy_of(model) or Alone(model)
            strategy.multiply([p.grad for p in model.parameters() if p.grad is not None], factor)

    def state_dict(self) -> State:
        return self._normaliser.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._normaliser.load_state_dict(state)

    def free_memory(self) -> None:
        self._prepared.release()
        self._accumulation.reset()
        clear_device_cache(garbage_collection=True)
