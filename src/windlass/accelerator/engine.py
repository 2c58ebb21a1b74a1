"""What makes the updates of an accelerator: a loop of the user's own, whose losses it divides, or a Trainer's runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.device_cache import clear_device_cache
from windlass.accelerator.executors import LoopExecutor
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.prepared_schedule import PreparedSchedule
from windlass.config.plan import DistPlan
from windlass.core.attributes import attributes_of
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.types import State
from windlass.data.dealt_loader import DealtLoader
from windlass.dist.beacon import AFTER, beacon
from windlass.dist.gang import Gang
from windlass.engine.executor import Executor
from windlass.engine.normalise import LoopNormaliser, MicroBatch, UpdateNormaliser
from windlass.transforms.alone import Alone
from windlass.transforms.ddp import Replicated
from windlass.transforms.strategy import Strategy
from windlass.zero.zero_executor import ZeroExecutor


def clip_norm(prepared: Prepared, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients down to a global norm of `max_norm`, and return the norm before that."""
    _check_limit("max_norm", max_norm)
    chosen, executors = _unscaled(prepared, parameters)
    if executors and isinstance(executors[0], ZeroExecutor):
        _check_clipped(executors[0], chosen, norm_type)
        return executors[0].clip(max_norm)
    # One for all: models of a loop are spread alike, and its strategy knows how their norm is computed.
    if executors:
        return executors[0].clip(max_norm, parameters=chosen, order=float(norm_type))  # type: ignore[call-arg]
    return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type)


def clip_values(prepared: Prepared, parameters: Any, clip_value: float) -> None:
    """Clamp gradients to [-clip_value, clip_value]."""
    _check_limit("clip_value", clip_value)
    chosen, executors = _unscaled(prepared, parameters)
    if any(isinstance(executor, ZeroExecutor) for executor in executors):
        raise ModelError("DeepSpeed's engine clips by the global norm only: use clip_grad_norm_")
    gradients = [p.grad for p in chosen if p.grad is not None]
    local = executors[0].strategy.local(gradients) if executors else gradients
    for gradient in local:
        gradient.clamp_(-clip_value, clip_value)


def _check_limit(name: str, value: Any) -> None:
    """Refuse NaN, which would make all gradients NaN, and a number below 0, which would turn them round. The value of a
    tensor is not looked at: the host would wait for the device.
    """
    if not isinstance(value, Tensor) and not (isinstance(value, Real) and float(value) >= 0):
        raise ConfigError(Problem(name, value, "must be a number of at least 0"))


def _unscaled(prepared: Prepared, parameters: Any) -> tuple[list[Any], list[LoopExecutor]]:
    """The parameters as a list, and the executors that update them, whose gradients are divided by the loss scale."""
    listed: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    # Each once: a parameter that two models share would count twice in the norm, and be scaled twice.
    chosen = list({id(parameter): parameter for parameter in listed}.values())
    executors = prepared.executors_over(chosen)
    if any(executor.updates_in_backward for executor in executors):
        raise ModelError(
            "the gradients of these parameters were used and freed in the backward, so they cannot be clipped: "
            "leave the call out, or choose an optimizer that keeps them"
        )
    for executor in executors:
        executor.unscale()
    return chosen, executors


def _check_clipped(executor: ZeroExecutor, parameters: list[Any], norm_type: float) -> None:
    trained = {id(p) for p in executor.strategy.module.parameters() if p.requires_grad}
    if norm_type != 2 or not trained <= set(map(id, parameters)):
        raise ModelError(
            "DeepSpeed's engine clips all parameters of a model by their L2 norm: pass model.parameters(), and no "
            "norm_type"
        )


@contextlib.contextmanager
def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
    """Context of a backward whose forward ran under `no_sync`: reduce its gradients.

    Only replicated models need it; for others it does nothing.
    """
    if not isinstance(model, Replicated):
        yield
        return
    sync = {"require_backward_grad_sync": True, "require_forward_param_sync": True, "reduces_next": True}
    with attributes_of(model, **sync):
        # The forward under `no_sync` did not prepare the reducer.
        model.reducer.prepare_for_backward([])
        yield


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
        dist: how the Trainer spreads models, from its arguments at this moment.
        autocast: returns the mixed-precision context of a forward.

    Attributes:
        step_was_skipped: set by the run after each update.
        backward: that of the normaliser of the run, for its executor.
    """

    saves_state = False

    def __init__(
        self,
        dist: Callable[[], DistPlan],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.step_was_skipped = False
        self._dist, self.autocast = dist, autocast
        self.backward: Callable[..., None] = _refuse_backward
        self.strategies: Sequence[Strategy] = ()
        self._model: nn.Module | None = None

    def take_model(self, model: nn.Module) -> None:
        """Use this model of the Trainer from now on, at its beginning and in each call."""
        self._model = model

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
            trained = (own for strategy in self.strategies for own in (strategy.module, strategy.model))
            return any(item is own for own in (self._model, *trained))
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
        self._prepared.executors.scale_again()
        executor.backward_in_loop(
            share, last=micro.last, discards=self._prepared.executors.discards, **kwargs
        )
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
        if stray := sum(tensor.grad is not None for tensor in self._prepared.loose.module.parameters()):
            raise ModelError(
                "LossTerms over several micro-batches are corrected after the last one, in the models that "
                f"`accumulate` names, and {stray} tensor(s) of no prepared model have gradients too: make them "
                "parameters of a module, prepare and name that, or set gradient_accumulation_steps=1"
            )
        corrected = set[int]()  # models may share a parameter
        for model in self._accumulation.models:
            found = {id(p): p.grad for p in model.parameters() if p.grad is not None}
            strategy = self._prepared.strategy_of(model) or Alone(model)
            strategy.multiply([grad for key, grad in found.items() if key not in corrected], factor)
            corrected |= found.keys()

    def state_dict(self) -> State:
        return self._normaliser.state_dict()

    def load_state_dict(self, state: State) -> None:
        # As in a new process: micro-batches before the load are no part of the next update. An optimizer that the
        # script has taken from the list, so that it is neither saved nor loaded, keeps its gradients.
        self._prepared.executors.abandon(self._prepared.optimizers)
        self._normaliser.load_state_dict(state)

    def free_memory(self) -> None:
        self._prepared.release()
        self._accumulation.reset()
        clear_device_cache(garbage_collection=True)
