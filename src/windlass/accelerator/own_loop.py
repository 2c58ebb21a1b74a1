"""The engine of a user's own loop: normalizes losses; prepared optimizers apply the updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.device_cache import clear_device_cache
from windlass.accelerator.prepared import Prepared
from windlass.config.plan import DistPlan
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.types import State
from windlass.dist.beacon import AFTER, beacon
from windlass.dist.gang import Gang
from windlass.engine.executor import Executor
from windlass.engine.normalise import LoopNormaliser, MicroBatch
from windlass.transforms.alone import Alone
from windlass.transforms.strategy import Strategy


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
