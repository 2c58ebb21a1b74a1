"""The objects that one accelerator has prepared, and the executors that update them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.accelerator.prepared_schedule import PreparedSchedule
from windlass.checkpoint.restorable import check_restorable
from windlass.core.errors import CheckpointError, ConfigError, ModelError, Problem
from windlass.core.logs import get_logger, warn_once
from windlass.core.module_state import customizes_state
from windlass.core.types import State, Stateful
from windlass.data.prepared_loader import PreparedLoader
from windlass.engine.fused import FusedExecutor
from windlass.engine.native import NativeExecutor
from windlass.engine.recorded import executor_for
from windlass.optim.per_parameter import updates_in_backward
from windlass.precision.scaler import Scaler
from windlass.transforms.alone import Alone
from windlass.transforms.buffers import ForwardState
from windlass.transforms.ddp import Replicated
from windlass.transforms.rebind import names_of, rebind
from windlass.transforms.strategy import Strategy
from windlass.zero.zero_executor import ZeroExecutor


class LooseTensors:
    """Saves and restores such tensors, in place.

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


_log = get_logger(__name__)
LoopExecutor = NativeExecutor | ZeroExecutor


class Prepared:
    """Models, optimizers, schedules and loaders of one loop.

    Each optimizer has an executor over the models whose parameters it updates. They share one loss scale, because one
    backward may reach the parameters of several.

    Args:
        scaler: the loss scaler of all optimizers.
        ranks: how many processes reduce gradients together.
        elsewhere: strategies of models that are updated elsewhere (by a Trainer's run).

    Attributes:
        strategies: the strategy of each model, in the order in which they were prepared.
        custom: the objects that were passed to `register_for_checkpointing`.
        guards: functions that remove the checks against calling a model without its wrapper.
        discards: True within `discarding`.
    """

    def __init__(
        self,
        scaler: Scaler,
        device: torch.device,
        ranks: int,
        elsewhere: Callable[[], Sequence[Strategy]],
    ) -> None:
        self.strategies: list[Strategy] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedules: list[PreparedSchedule] = []
        self.loaders: list[PreparedLoader] = []
        self.custom: list[Stateful] = []
        self.guards: list[Callable[[], None]] = []
        self.scaler = scaler
        self._device, self._ranks = device, ranks
        self._elsewhere, self.discards = elsewhere, False
        self._restorable: list[Strategy] = []  # their models load what they save
        # The number of its parameters, and the executor over them; until the script drops the optimizer.
        self._executors: weakref.WeakKeyDictionary[PreparedOptimizer, tuple[int, NativeExecutor]]
        self._executors = weakref.WeakKeyDictionary()
        # By optimizer that DeepSpeed's engine steps: its executor, and its parameters before they were divided.
        self._engines: dict[int, tuple[ZeroExecutor, list[Tensor]]] = {}
        # Parameters before their model was sharded, for optimizers that were built on them.
        self._before: dict[int, tuple[str, weakref.ref[Tensor]]] = {}

    # --- models -------------------------------------------------------------------------------------------------------

    @property
    def all_strategies(self) -> list[Strategy]:
        """The strategies of all known models, including those that are updated elsewhere."""
        return [*self._elsewhere(), *self.strategies]

    @property
    def models(self) -> PreparedModels:
        """What `prepare` returned for each model, those that are updated elsewhere first."""
        return PreparedModels(self.strategies, self._elsewhere)

    @models.setter
    def models(self, kept: Iterable[nn.Module]) -> None:
        self.models[:] = kept

    @property
    def forwards_meet(self) -> bool:
        """True if forwards of a prepared model are collective, so all processes must make the same number of them."""
        return any(s.sharded or s.model is not s.module for s in self.strategies)

    def strategy_of(self, model: nn.Module) -> Strategy | None:
        """The strategy of the user's module, or of what `prepare` returned for it; None if it was not prepared."""
        for strategy in self.all_strategies:
            if model is strategy.model or model is strategy.module:
                return strategy
        return None

    def check_restorable(self) -> None:
        """Check, before its first save, that each model that customizes its state dict loads what it saves."""
        for strategy in self.strategies:
            if strategy not in self._restorable and customizes_state(strategy.module):
                check_restorable(strategy.module)
                self._restorable.append(strategy)

    @property
    def everything(self) -> nn.Module:
        """All models as one module, in which parameter names are unique."""
        return nn.ModuleList([strategy.module for strategy in self.strategies])

    def spread(self, modules: list[nn.Module], build: Callable[[nn.Module], Strategy]) -> None:
        """Spread `modules`, and replace the parameters of all prepared optimizers by the resulting ones."""
        held = [strategy.module for strategy in self.strategies]
        before = nn.ModuleList([*held, *modules])
        parameters: dict[int, weakref.ref[Tensor]] = {id(p): weakref.ref(p) for p in before.parameters()}
        for key, name in names_of(before).items():
            self._before[key] = name, parameters[key]
        self.strategies += [build(module) for module in modules]
        self._forget_executors()
        for optimizer in self.optimizers:
            self.follow(optimizer.optimizer)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of `optimizer` that were sharded by the resulting ones."""
        before = {id(p): self._before[id(p)][0] for p in parameters_of(optimizer) if self._was_replaced(p)}
        if before:
            rebind(optimizer, before, self.everything, keeps_others=self._ranks == 1)

    def updates(self, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module] = ()) -> bool:
        """Return True if `optimizer` updates a parameter of a prepared model, or of one of `modules`."""
        known = {id(p) for module in (self.everything, *modules) for p in module.parameters()}
        return any(id(p) in known or self._was_replaced(p) for p in parameters_of(optimizer))

    def updates_in_backward(self, model: nn.Module) -> bool:
        """Return True if a prepared optimizer updates parameters of `model` in the backward."""
        own = set(map(id, model.parameters()))
        fused = [o for o in self.optimizers if updates_in_backward(o.optimizer)]
        return any(id(p) in own for optimizer in fused for p in parameters_of(optimizer))

    def _was_replaced(self, parameter: Tensor) -> bool:
        name, reference = self._before.get(id(parameter), ("", None))
        return bool(name) and reference is not None and reference() is parameter

    @property
    def parts(self) -> dict[str, Stateful]:
        """The parts of a checkpoint besides models, optimizers and positions in the data, by name."""
        schedules = {f"scheduler_{index}": schedule for index, schedule in enumerate(self.schedules)}
        custom = {f"custom_checkpoint_{index}": item for index, item in enumerate(self.custom)}
        loose = {"loose_tensors": self.loose} if len(self.loose) else {}
        return {**schedules, **custom, **loose, "scaler": self.scaler}

    @property
    def loose(self) -> LooseTensors:
        """The tensors that prepared optimizers update and that belong to no prepared model."""
        own = {id(p) for strategy in self.strategies for p in strategy.module.parameters()}
        found: dict[str, Tensor] = {}
        for number, optimizer in enumerate(self.optimizers):
            if id(optimizer) in self._engines:
                continue
            for index, group in enumerate(optimizer.param_groups):
                for position, tensor in enumerate(group["params"]):
                    if id(tensor) not in own:
                        own.add(id(tensor))
                        found[f"{number}_{index}_{position}"] = tensor
        return LooseTensors(found)

    # --- updates ------------------------------------------------------------------------------------------------------

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
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known, executor = self._executors.get(optimizer, (0, None))
        if executor is None or known != count:
            parameters: Any = parameters_of(optimizer)
            strategy = self._strategy_over(optimizer, parameters)
            if isinstance(executor, FusedExecutor):
                executor.remove_hooks()
            executor = self._new_executor(strategy, optimizer.optimizer, parameters)
            self._executors[optimizer] = count, executor
        return executor

    def _new_executor(self, strategy: Strategy, optimizer: Any, parameters: Any) -> NativeExecutor:
        if not updates_in_backward(optimizer):
            return executor_for(self._device)(strategy, optimizer, self._device, self.scaler, parameters)
        return FusedExecutor(strategy, optimizer, self._device, self.scaler, parameters)

    @property
    def executor(self) -> LoopExecutor:
        """The executor of a backward, which may reach the parameters of several optimizers: all use one loss scale."""
        return self.engine or self.fused or self._scaling

    @functools.cached_property
    def _scaling(self) -> NativeExecutor:
        """Scales losses, and updates nothing: for optimizers that update after the backward, or are not prepared."""
        nothing = torch.optim.SGD([{"params": []}], lr=0.0)
        return NativeExecutor(Alone(nn.Module()), nothing, self._device, self.scaler, [])

    @property
    def fused(self) -> FusedExecutor | None:
        """The executor of the optimizer that updates in the backward; None if there is none. Raises ConfigError if it
        was prepared with other optimizers, with fp16, or after its replicated model.
        """
        found = [o for o in self.optimizers if updates_in_backward(o.optimizer)]
        if not found:
            return None
        name = type(found[0].optimizer).__name__
        if len(self.optimizers) > 1:
            fix = f"it updates in the backward, so it must be the only optimizer; {len(self.optimizers)} were prepared"
            raise ConfigError(Problem("optimizer", name, fix))
        if self.scaler.active:
            fix = f"{name} updates in the backward, before an overflow is known: use bf16, or a Trainer"
            raise ConfigError(Problem("mixed_precision", "fp16", fix))
        executor = self.executor_of(found[0])
        assert isinstance(executor, FusedExecutor)
        if isinstance(executor.strategy.model, Replicated):
            fix = "it updates in the backward: pass it to the call of `prepare` that its model is passed to"
            raise ConfigError(Problem("optimizer", name, fix))
        return executor

    def _forget_executors(self) -> None:
        for _, executor in self._executors.values():
            if isinstance(executor, FusedExecutor):
                executor.remove_hooks()
        self._executors.clear()

    def _strategy_over(self, optimizer: PreparedOptimizer, parameters: list[Tensor]) -> Strategy:
        loose = self.loose.module
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

    def owner_of(self, optimizer: PreparedOptimizer) -> nn.Module:
        """The module whose parameter names a checkpoint uses for the optimizer: its model, or all models and
        the tensors of no model.
        """
        wanted = set(map(id, self.parameters_of(optimizer)))
        for strategy in self.strategies:
            if wanted <= {id(p) for p in strategy.module.parameters()}:
                return strategy.module
        loose = self.loose
        return nn.ModuleList([self.everything, loose.module]) if len(loose) else self.everything

    def executors_over(self, parameters: Iterable[Tensor]) -> list[LoopExecutor]:
        """The executors that update any of `parameters`."""
        wanted = {id(p) for p in parameters}
        return [
            self.executor_of(optimizer)
            for optimizer in self.optimizers
            if any(id(p) in wanted for p in self.parameters_of(optimizer))
        ]

    @contextlib.contextmanager
    def discarding(self) -> Iterator[None]:
        """Context of forwards and backwards whose results are discarded: prepared models do not change."""
        before = [ForwardState(strategy.module) for strategy in self.strategies]
        self.discards = True
        try:
            yield
        finally:
            self.discards = False
            for state in before:
                state.restore()
            for optimizer in self.optimizers:
                optimizer.optimizer.zero_grad()

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
        return True, optimizer.optimizer.step(closure)

    def _step(self, optimizer: PreparedOptimizer) -> bool:
        if self.discards:
            return False
        executor = self.executor_of(optimizer)
        if not self.scaler.active or isinstance(executor, ZeroExecutor):
            applied = executor.step()
            if executor.dispatch is not None:
                executor.dispatch()
            return applied
        executor.unscale()
        unit = torch.ones((), device=self._device)
        earlier = self.scaler.scale(unit)
        applied = executor.step()
        factor = self.scaler.scale(unit) / earlier
        for other in self.optimizers:
            if other is not optimizer and isinstance(follower := self.executor_of(other), NativeExecutor):
                follower.follow_scale(factor)
        return applied

    def release(self) -> None:
        """Remove all objects, and make the user's objects usable without the accelerator."""
        for remove in self.guards:
            remove()
        for optimizer in self.optimizers:
            optimizer.release()
        for executor, _ in self._engines.values():
            executor.release()
        for strategy in self.strategies:
            strategy.release()
        self.strategies, self.optimizers, self.schedules, self.loaders = [], [], [], []
        self.guards = []
        self._forget_executors()
        self._before, self._engines = {}, {}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class PreparedModels(MutableSequence[nn.Module]):
    """What `prepare` returned for each model. A model that is removed is neither saved nor loaded from then on.

    Args:
        own: the strategies of the prepared models; models are removed here.
        elsewhere: strategies of models that are updated elsewhere (by a Trainer's run); they come first, and stay.
    """

    def __init__(self, own: list[Strategy], elsewhere: Callable[[], Sequence[Strategy]]) -> None:
        self._own, self._elsewhere = own, elsewhere

    @property
    def _strategies(self) -> list[Strategy]:
        return [*self._elsewhere(), *self._own]

    def __len__(self) -> int:
        return len(self._strategies)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._strategies[index]
        return [one.model for one in chosen] if isinstance(chosen, list) else chosen.model

    def __delitem__(self, index: Any) -> None:
        chosen = self._strategies[index]
        for strategy in chosen if isinstance(chosen, list) else [chosen]:
            if strategy not in self._own:
                fix = "it is the model of the Trainer, which saves it"
                raise ConfigError(Problem("_models", type(strategy.module).__name__, fix))
            self._own.remove(strategy)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Keep some of the models; only a slice can be assigned to."""
        values = list(value) if isinstance(index, slice) else [value]
        for model in values:
            if not any(model is known for known in self):
                self._refuse(model)
        for model in self[index] if isinstance(index, slice) else [self[index]]:
            if not any(model is kept for kept in values):
                self.remove(model)

    def insert(self, index: int, value: nn.Module) -> None:
        """Refused: only `prepare` adds a model."""
        self._refuse(value)

    def _refuse(self, model: Any) -> None:
        fix = "is not a prepared model: models are added by prepare(), and can only be removed here"
        raise ConfigError(Problem("_models", type(model).__name__, fix))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))
