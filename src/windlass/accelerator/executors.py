"""The executors of a loop: each updates the models of one prepared optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.core.errors import CheckpointError, ModelError
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.types import State
from windlass.engine.fused import FusedExecutor
from windlass.engine.native import NativeExecutor
from windlass.engine.recorded import executor_for
from windlass.optim.per_parameter import updates_in_backward
from windlass.precision.scaler import Scaler
from windlass.transforms.alone import Alone
from windlass.transforms.strategy import Strategy, unfrozen
from windlass.zero.zero_executor import ZeroExecutor


class LooseTensors:
    """Saves and restores tensors that optimizers update and that belong to no prepared model, in place.

    Args:
        tensors: by name, which is the place in the optimizers: "OPTIMIZER_GROUP_POSITION", counted from 0.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def module(self) -> nn.Module:
        """A module whose parameters they are, for their names in the state of optimizers."""
        return _Holder(self._tensors)

    def state_dict(self) -> State:
        return {name: tensor.detach() for name, tensor in self._tensors.items()}

    def load_state_dict(self, state: State) -> None:
        shapes = {name: list(tensor.shape) for name, tensor in self._tensors.items()}
        saved = {name: list(tensor.shape) for name, tensor in state.items()}
        if shapes != saved:
            raise CheckpointError(
                f"the tensors of no model in the checkpoint are {saved}, and those of the optimizers are {shapes}: "
                "build and prepare the optimizers as they were when it was saved"
            )
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(state[name])


class _Holder(nn.Module):
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        # `register_parameter` refuses tensors that are not `nn.Parameter`s.
        self._parameters.update(tensors)  # type: ignore[arg-type]


_log = get_job_logger(__name__)
LoopExecutor = NativeExecutor | ZeroExecutor


class Executors:
    """Each optimizer has an executor over the models whose parameters it updates. They share one loss scale, because
    one backward may reach the parameters of several.

    A prepared optimizer steps through this. So this does not keep one: it knows those that the loop or the script keep.

    Args:
        scaler: the loss scaler of all optimizers.
        ranks: how many processes reduce gradients together.

    Attributes:
        strategies: the strategy of each prepared model, in the order in which they were prepared.
        discards: gradients are not used: no optimizer steps.
    """

    def __init__(self, scaler: Scaler, device: torch.device, ranks: int) -> None:
        self.strategies: list[Strategy] = []
        self.scaler, self.discards = scaler, False
        self._device, self._ranks = device, ranks
        # In the order in which they were prepared.
        self._optimizers: list[weakref.ref[PreparedOptimizer]] = []
        # The number of its parameters, and the executor over them.
        self._executors = weakref.WeakKeyDictionary[PreparedOptimizer, tuple[int, NativeExecutor]]()
        # The parameters of each that no strategy averages: they may be there as long as they have no gradients.
        self._apart = weakref.WeakKeyDictionary[PreparedOptimizer, list[Tensor]]()
        # By optimizer that DeepSpeed's engine steps: its executor, and its parameters before they were divided.
        self._engines: dict[int, tuple[ZeroExecutor, list[Tensor]]] = {}

    def add(self, optimizer: PreparedOptimizer) -> None:
        """Add an optimizer that was prepared."""
        self._optimizers = [weakref.ref(known) for known in (*self._known(), optimizer)]

    def _known(self) -> list[PreparedOptimizer]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def loose(self, optimizers: Iterable[PreparedOptimizer]) -> LooseTensors:
        """The tensors that these optimizers update and that belong to no prepared model."""
        own = {id(p) for strategy in self.strategies for p in strategy.module.parameters()}
        found: dict[str, Tensor] = {}
        for number, optimizer in enumerate(optimizers):
            if id(optimizer) in self._engines:
                continue
            for index, group in enumerate(optimizer.param_groups):
                for position, tensor in enumerate(group["params"]):
                    if id(tensor) not in own:
                        own.add(id(tensor))
                        found[f"{number}_{index}_{position}"] = tensor
        return LooseTensors(found)

    def use_engine(self, optimizer: PreparedOptimizer, make: Callable[[], ZeroExecutor]) -> ZeroExecutor:
        """Give an optimizer, and the model that it updates, to DeepSpeed's engine, which `make` makes. Collective."""
        parameters = parameters_of(optimizer)
        executor = make()
        self._engines[id(optimizer)] = executor, parameters
        return executor

    @property
    def engine(self) -> ZeroExecutor | None:
        """The executor of DeepSpeed's engine; None if there is none."""
        return next((executor for executor, _ in self._engines.values()), None)

    def parameters_of(self, optimizer: PreparedOptimizer) -> list[Tensor]:
        """The parameters of the models that an optimizer updates."""
        engine = self._engines.get(id(optimizer))
        return parameters_of(optimizer) if engine is None else engine[1]

    def executor_of(self, optimizer: PreparedOptimizer) -> LoopExecutor:
        """The executor of one optimizer and its models."""
        if id(optimizer) in self._engines:
            return self._engines[id(optimizer)][0]
        # Another number: a group was added since.
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known, executor = self._executors.get(optimizer, (0, None))
        if executor is None or known != count:
            parameters: Any = parameters_of(optimizer)
            strategy = self._strategy_over(optimizer, parameters)
            if isinstance(executor, FusedExecutor):
                executor.remove_hooks()
            executor = self._new_executor(strategy, optimizer.optimizer, parameters)
            self._executors[optimizer] = count, executor
            self._apart[optimizer] = self._not_averaged(parameters)
        return executor

    def _not_averaged(self, parameters: list[Tensor]) -> list[Tensor]:
        """Those whose gradients would stay different on the processes: frozen when their model was prepared, or new."""
        if self._ranks == 1:
            return []
        averaged = {id(p) for one in self.strategies for p in one.module.parameters() if one.averages(p)}
        return [p for p in parameters if id(p) not in averaged]

    def _new_executor(self, strategy: Strategy, optimizer: Any, parameters: Any) -> NativeExecutor:
        if not updates_in_backward(optimizer):
            return executor_for(self._device)(strategy, optimizer, self._device, self.scaler, parameters)
        return FusedExecutor(strategy, optimizer, self._device, self.scaler, parameters)

    def forget(self) -> None:
        """Make executors again when they are needed: models have changed."""
        for _, executor in self._executors.values():
            if isinstance(executor, FusedExecutor):
                executor.remove_hooks()
        self._executors.clear()

    def _strategy_over(self, optimizer: PreparedOptimizer, parameters: list[Tensor]) -> Strategy:
        loose = self.loose(self._known()).module
        count = len({id(p) for p in parameters} & {id(p) for p in loose.parameters()})
        if count:
            self._allow_loose(type(optimizer.optimizer).__name__, count)
        wanted = {id(p) for p in parameters}
        for strategy in self.strategies:
            if any(id(p) in wanted for p in strategy.module.parameters()):
                return strategy
        return Alone(loose)

    def _allow_loose(self, name: str, count: int) -> None:
        """Raise ModelError on several processes: nothing would average the gradients of tensors of no model."""
        if self._ranks > 1:
            raise ModelError(
                f"the {name} that was prepared updates {count} tensor(s) that are no parameter of a prepared model, so "
                f"their gradients would differ between the {self._ranks} processes: make them parameters of a module, "
                "give it to `prepare` too, and build the optimizer from its parameters"
            )
        warn_once(
            _log,
            f"The {name} updates {count} tensor(s) that are no parameter of a prepared model. save_state saves them "
            "and their optimizer's state, by the place in the optimizer; of a module that was not prepared it saves "
            "nothing else, such as buffers.",
        )

    def update(
        self, optimizer: PreparedOptimizer, closure: Callable[[], Any] | None = None
    ) -> tuple[bool, Any]:
        """Apply an update. Return if it was applied, and the result of the closure.

        If that changes the loss scale, the gradients of the other optimizers are rescaled.
        """
        if closure is None:
            return self._step(optimizer), None
        if id(optimizer) in self._engines:
            raise ModelError(
                "DeepSpeed's engine steps without a closure: call accelerator.backward(loss) and then step()"
            )
        if self.scaler.active:
            raise ModelError("an optimizer that takes a closure cannot run in fp16; use bf16 or fp32")
        if self.discards:
            return False, closure()
        strategy = self.executor_of(optimizer).strategy  # it refuses tensors of no model

        def checked() -> Any:
            value = closure()
            self._check_averaged(optimizer)
            if strategy.reduces:
                strategy.check_used()
            return value

        return True, optimizer.optimizer.step(checked)

    def _check_averaged(self, optimizer: PreparedOptimizer) -> None:
        if any(p.grad is not None for p in self._apart.get(optimizer, ())):
            raise unfrozen()

    def _step(self, optimizer: PreparedOptimizer) -> bool:
        if self.discards:
            return False
        executor = self.executor_of(optimizer)
        self._check_averaged(optimizer)
        if not self.scaler.active or isinstance(executor, ZeroExecutor):
            applied = executor.step()
            if executor.dispatch is not None:
                executor.dispatch()
            return applied
        executor.unscale()
        # The scale is read through `scale`, on the device: the host does not wait for it.
        unit = torch.ones((), device=self._device)
        earlier = self.scaler.scale(unit)
        applied = executor.step()
        factor = self.scaler.scale(unit) / earlier
        for other in self._known():
            if other is not optimizer and isinstance(follower := self.executor_of(other), NativeExecutor):
                follower.follow_scale(factor)
        return applied

    def scale_again(self) -> None:
        """Before a backward: gradients that were clipped or unscaled have the loss scale again. By an executor: without
        one they were not, and after a forward a sharded model does not show the parameters that it would be made for.
        """
        if self.scaler.active:
            for _, executor in self._executors.values():
                executor.scale_again()

    def abandon(self, optimizers: Iterable[PreparedOptimizer]) -> None:
        """Drop the gradients of the update under way of these optimizers."""
        for executor in map(self.executor_of, optimizers):
            executor.zero_grad()
            executor.abandon()

    def release(self) -> None:
        """Drop all models and optimizers."""
        for executor, _ in self._engines.values():
            executor.release()
        for strategy in self.strategies:
            strategy.release()
        self.forget()
        self.strategies.clear()
        self._optimizers.clear()
        self._engines = {}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
