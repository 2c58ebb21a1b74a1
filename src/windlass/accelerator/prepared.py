"""The objects that one accelerator has prepared, and the executors that update them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.accelerator.executors import Executors, LoopExecutor, LooseTensors, parameters_of
from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.accelerator.prepared_schedule import PreparedSchedule
from windlass.checkpoint.restorable import check_restorable
from windlass.core.errors import ConfigError, Problem
from windlass.core.module_state import customizes_state
from windlass.core.types import Stateful
from windlass.data.prepared_loader import PreparedLoader
from windlass.engine.fused import FusedExecutor
from windlass.engine.native import NativeExecutor
from windlass.optim.per_parameter import updates_in_backward
from windlass.precision.scaler import Scaler
from windlass.transforms.alone import Alone
from windlass.transforms.buffers import ForwardState
from windlass.transforms.ddp import Replicated
from windlass.transforms.rebind import names_of, rebind
from windlass.transforms.strategy import Strategy


class Prepared:
    """Models, optimizers, schedules and loaders of one loop.

    Args:
        scaler: the loss scaler of all optimizers.
        ranks: how many processes reduce gradients together.
        elsewhere: strategies of models that are updated elsewhere (by a Trainer's run).

    Attributes:
        executors: of the optimizers.
        strategies: the strategy of each model, in the order in which they were prepared.
        custom: the objects that were passed to `register_for_checkpointing`.
        guards: functions that remove the checks against calling a model without its wrapper.
    """

    def __init__(
        self,
        scaler: Scaler,
        device: torch.device,
        ranks: int,
        elsewhere: Callable[[], Sequence[Strategy]],
    ) -> None:
        self.executors = Executors(scaler, device, ranks)
        self.strategies, self.scaler = self.executors.strategies, scaler
        self.optimizers: list[PreparedOptimizer] = []
        self.schedules: list[PreparedSchedule] = []
        self.loaders: list[PreparedLoader] = []
        self.custom: list[Stateful] = []
        self.guards: list[Callable[[], None]] = []
        self._device, self._ranks, self._elsewhere = device, ranks, elsewhere
        self._restorable: list[Strategy] = []  # their models load what they save
        self._ever: list[weakref.ref[nn.Module]] = []  # each model that was prepared; see `_all_ever`
        # Parameters before their model was sharded, for optimizers that were built on them. By weak references: once a
        # parameter is freed, its `id` may be that of another tensor.
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

    @property
    def _all_ever(self) -> nn.Module:
        """All models, in places that stay: by `everything`, an optimizer of a model that was removed from the list
        would get the parameters of the one that has its place now.
        """
        found = [reference() for reference in self._ever]
        return nn.ModuleList([nn.Module() if module is None else module for module in found])

    def spread(self, modules: list[nn.Module], build: Callable[[nn.Module], Strategy]) -> None:
        """Spread `modules`, and replace the parameters of all prepared optimizers by the resulting ones."""
        self._ever += map(weakref.ref, modules)
        before = self._all_ever
        parameters: dict[int, weakref.ref[Tensor]] = {id(p): weakref.ref(p) for p in before.parameters()}
        for key, name in names_of(before).items():
            self._before[key] = name, parameters[key]
        self.strategies += [build(module) for module in modules]
        self.executors.forget()
        for optimizer in self.optimizers:
            self.follow(optimizer.optimizer)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of `optimizer` that were sharded by the resulting ones."""
        before = {id(p): self._before[id(p)][0] for p in parameters_of(optimizer) if self._was_replaced(p)}
        if before:
            # In one process an optimizer may also update tensors of no model; see `Executors`.
            rebind(optimizer, before, self._all_ever, keeps_others=self._ranks == 1)

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

    # --- updates ------------------------------------------------------------------------------------------------------

    @property
    def loose(self) -> LooseTensors:
        """The tensors that prepared optimizers update and that belong to no prepared model."""
        return self.executors.loose(self.optimizers)

    @property
    def executor(self) -> LoopExecutor:
        """The executor of a backward, which may reach the parameters of several optimizers: all use one loss scale."""
        return self.executors.engine or self.fused or self._scaling

    @functools.cached_property
    def _scaling(self) -> NativeExecutor:
        """Scales losses, and updates nothing: for optimizers that update after the backward, or are not prepared."""
        # PyTorch refuses an empty list of parameters, and takes an empty group.
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
        executor = self.executors.executor_of(found[0])
        assert isinstance(executor, FusedExecutor)
        if isinstance(executor.strategy.model, Replicated):
            fix = "it updates in the backward: pass it to the call of `prepare` that its model is passed to"
            raise ConfigError(Problem("optimizer", name, fix))
        return executor

    def owner_of(self, optimizer: PreparedOptimizer) -> nn.Module:
        """The module whose parameter names a checkpoint uses for the optimizer: its model, or all models and
        the tensors of no model.
        """
        wanted = set(map(id, self.executors.parameters_of(optimizer)))
        for strategy in self.strategies:
            if wanted <= {id(p) for p in strategy.module.parameters()}:
                return strategy.module
        loose = self.loose
        return nn.ModuleList([self.everything, loose.module]) if len(loose) else self.everything

    def executors_over(self, parameters: Iterable[Tensor]) -> list[LoopExecutor]:
        """The executors that update any of `parameters`."""
        wanted = {id(p) for p in parameters}
        return [
            self.executors.executor_of(optimizer)
            for optimizer in self.optimizers
            if any(id(p) in wanted for p in self.executors.parameters_of(optimizer))
        ]

    @contextlib.contextmanager
    def discarding(self) -> Iterator[None]:
        """Context of forwards and backwards whose results are discarded: prepared models do not change."""
        before = [ForwardState(strategy.module) for strategy in self.strategies]
        self.executors.discards = True
        try:
            yield
        finally:
            self.executors.discards = False
            for state in before:
                state.restore()
            for optimizer in self.optimizers:
                optimizer.optimizer.zero_grad()

    def release(self) -> None:
        """Remove all objects, and make the user's objects usable without the accelerator."""
        for remove in self.guards:
            remove()
        for optimizer in self.optimizers:
            optimizer.release()
        self.executors.release()
        self.optimizers, self.schedules, self.loaders = [], [], []
        self.guards, self._before, self._restorable, self._ever = [], {}, [], []


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
