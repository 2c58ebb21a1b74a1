"""The executor of DeepSpeed's ZeRO: the engine reduces, clips and updates what it divides among ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.names import shorten
from windlass.config.deepspeed import precision_of, stage_of
from windlass.config.plan import ZeroPlan
from windlass.core.errors import ConfigError, ModelError, Problem, refuse
from windlass.core.module_state import bare, customizes_state, let_go
from windlass.core.run_clock import COMPUTE, UPDATE, run_clock
from windlass.core.types import State
from windlass.core.waiting import thread_waiting
from windlass.data.update_batch import UpdateBatch
from windlass.dist.beacon import beacon
from windlass.dist.gang import Gang
from windlass.engine.executor import StepHooks, StepResult, WeightAverage
from windlass.transforms.strategy import Strategy, embedding_problems, unfrozen
from windlass.zero.flat_optimizer import ZeroOptimizer
from windlass.zero.library import ZeroEngine
from windlass.zero.zero_model import ZeroModel

_SUMMED = (
    "LossTerms(aux=...) under gradient accumulation needs separate gradients, which ZeRO does not have: set "
)


class ZeroExecutor:
    """Implements `engine.executor.Executor`.

    Every backward reduces its gradients, and the norm is known only in the update, which clips.

    Args:
        module: on its device; the engine changes it in place.
        optimizer: the user's; an optimizer whose update of an element depends on that element alone.
        plan: its configuration is complete.

    Raises:
        ConfigError: the optimizer or the model cannot be used under ZeRO.
    """

    updates_in_backward = can_undo = False
    dispatch: Callable[[], None] | None = None

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: ZeroPlan,
        device: torch.device,
        loss_ranks: Gang,
    ) -> None:
        _check_optimizer(optimizer, plan)
        _check_model(module, plan)
        let_go(module)
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        own = ZeroOptimizer(optimizer)
        self._engine = ZeroEngine(module, own, plan.config, device, loss_ranks)
        own.use_engine(self._engine.places(), self._engine.zero_grad)
        self.optimizer: torch.optim.Optimizer = own
        self._own, self._device = own, device
        self.strategy: Strategy = ZeroModel(module, self._engine, loss_ranks)
        self._usual_norm = self._max_norm = plan.max_norm
        self._overflowed = self._released = False
        self._scales = bool(plan.config.get("fp16", {}).get("enabled"))
        self._norm, self._is_last = torch.zeros((), device=device), True
        self._beacon, self._waiting, self._clock = beacon(), thread_waiting(), run_clock()

    @property
    def model(self) -> nn.Module:
        return self.strategy.model

    # --- primitives -------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **options: Any) -> None:
        unknown = sorted(options.keys() - {"retain_graph"})
        if unknown:
            raise ModelError(
                f"backward({', '.join(unknown)}=...) is not possible under DeepSpeed; leave these arguments out"
            )
        self._engine.backward(loss, bool(options.get("retain_graph")))

    def has_own_gradients(self) -> bool:
        return False  # they are the engine's

    def has_whole_gradients(self) -> bool:
        return False

    def backward_in_loop(self, loss: Tensor, *, last: bool, discards: bool, **options: Any) -> None:
        self._is_last = last
        self.backward(loss, **options)

    def backward_aux(self, loss: Tensor) -> None:
        if loss.requires_grad:
            raise ModelError(
                f"{_SUMMED}gradient_accumulation_steps=1, or put the auxiliary terms into the sum"
            )

    def add_aux(self, factor: Tensor) -> None:
        """No auxiliary gradients exist."""

    def unscale(self) -> None:
        """Gradients are not scaled."""

    def clip(self, max_norm: float | None) -> Tensor:
        """Clip in the next `step`, and return the norm before it; of an unfinished group, that of the last update."""
        self._max_norm = max_norm
        if self._is_last:
            self._norm = self._engine.norm().to(self._device)
        return self._norm

    def step(self) -> bool:
        if any(p.requires_grad for p in self._frozen):  # which the engine does not update
            raise unfrozen()
        norm, finite = self._engine.step(self._max_norm)
        self._norm = norm.to(self._device)
        applied = finite and not self._own.skips
        self._overflowed = self._scales and not finite
        self._max_norm, self._own.skips = self._usual_norm, False
        self._waiting.look()
        return applied

    def zero_grad(self) -> None:
        """Discard what backwards added since the last step, which frees its own."""
        self._engine.zero_grad()

    def abandon(self) -> bool:
        """The engine cannot take back a half-finished backward or update."""
        return False

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        with self.strategy.buffers_of_first_rank():
            yield

    def average_by(self, average: WeightAverage | None) -> None:
        if average is not None:
            fix = "averages whole parameters, which ZeRO divides; leave it out, or train without DeepSpeed"
            raise ConfigError(Problem("callbacks", type(average).__name__, fix))

    def averaged(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def begin(self) -> None:
        """The optimizer has no modes."""

    def finish(self) -> None:
        """The optimizer has no modes."""

    # --- one update -------------------------------------------------------------------------------------------------

    def run_step(
        self, update: UpdateBatch, hooks: StepHooks, *, max_norm: float | None = None, guard: bool = False
    ) -> StepResult:
        if not self.strategy.module.training:  # after an evaluation, or a callback that sampled from it
            self.model.train()
        losses: list[Tensor] = []
        last = len(update.batches) - 1
        for index in range(last + 1):
            losses.append(hooks.micro_step(update, index))
            if index != last and "on_substep_end" in hooks.heard:
                hooks.event("on_substep_end")
        self._beacon.call("norm and update")
        self._clock.enter(UPDATE)
        loss, (rescale, parts) = sum(losses[1:], losses[0]), hooks.complete()
        if rescale is not None:
            loss = loss * rescale
            self.strategy.multiply([], rescale)
        self._max_norm = max_norm
        # An update without targets changes nothing, as it would by weight decay and momentum.
        self._own.skips = rescale is None and not update.denominator
        if "on_pre_optimizer_step" in hooks.heard:
            hooks.event("on_pre_optimizer_step")
        applied = self.step()
        if "on_optimizer_step" in hooks.heard:
            hooks.stepped(applied)
        self._clock.enter(COMPUTE)
        return StepResult(loss, self._norm, applied, parts, self._overflowed, losses)

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        self.strategy.warm_up(backward)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self.strategy.release()
            self._own.release()

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        return {"scaler": self._engine.scaler_state() if self._scales else {}}

    def load_state_dict(self, state: State) -> None:
        self._engine.load_scaler_state(state["scaler"])


_ELEMENTWISE = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Adadelta,
)
# These need whole matrices; optimizers of the package declare it (`elementwise`).
_WHOLE = (torch.optim.Muon, torch.optim.Adafactor)


def _check_optimizer(optimizer: torch.optim.Optimizer, plan: ZeroPlan) -> None:
    """Check that the optimizer may work on flat tensors, in which parameters are joined and cut."""
    name = type(optimizer).__name__
    if getattr(optimizer, "in_backward", False):
        fix = (
            "updates each layer within the backward, before ZeRO has summed and divided the gradients; choose "
            "adamw_torch, or fsdp=True"
        )
        raise ConfigError(Problem("optim", name, fix))
    elementwise = True if type(optimizer) in _ELEMENTWISE else getattr(optimizer, "elementwise", None)
    if elementwise is False or isinstance(optimizer, _WHOLE):
        fix = "computes with whole matrices or layers, which ZeRO joins and cuts; choose adamw_torch, or fsdp=True"
        raise ConfigError(Problem("optim", name, fix))
    if callable(getattr(optimizer, "eval", None)):
        fix = "averages weights, which ZeRO divides; choose adamw_torch, or fsdp=True"
        raise ConfigError(Problem("optim", name, fix))
    if isinstance(optimizer, torch.optim.Adagrad):
        fix = "makes its state before ZeRO divides the parameters; choose adamw_torch, or fsdp=True"
        raise ConfigError(Problem("optim", name, fix))
    if elementwise is None and not plan.any_optimizer:
        fix = (
            "ZeRO joins parameters into flat tensors and cuts them anywhere, and it is not known if this optimizer "
            "needs whole matrices or layers: choose adamw_torch or fsdp=True, or, if its update of an element depends "
            f'on that element alone, set "zero_allow_untested_optimizer": true in {plan.origin}'
        )
        raise ConfigError(Problem("optim", name, fix))


def _check_model(module: nn.Module, plan: ZeroPlan) -> None:
    if customizes_state(module):
        raise ModelError(
            f"{type(bare(module)).__name__} overrides how its state dict is made or loaded, which checkpoints under "
            "DeepSpeed do not call: remove the override, or train without DeepSpeed"
        )
    refuse(embedding_problems(module, divided=True))
    whole = (
        (name, getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in module.named_parameters()
    )
    scalars = [name for name, shape in whole if len(shape) == 0]
    if scalars:
        raise ModelError(
            f"the model has parameters without dimensions, which DeepSpeed cannot divide: {shorten(scalars)}. Give "
            "them the shape [1] (torch.ones(1), not torch.tensor(1.0)), or train without DeepSpeed"
        )
    mixed = [name for name, parameter in module.named_parameters() if parameter.is_complex()]
    if mixed:
        raise ModelError(
            f"the model has complex parameters, which DeepSpeed cannot join with real ones: {shorten(mixed)}. Train "
            "without DeepSpeed; fsdp=True leaves them whole"
        )
    dtypes = sorted({str(p.dtype) for p in module.parameters() if p.requires_grad})
    if len(dtypes) > 1 and stage_of(plan.config) == 3 and precision_of(plan.config) is None:
        raise ModelError(
            f"the model trains parameters of several dtypes ({', '.join(dtypes)}), which stage 3 of DeepSpeed cannot "
            "join: convert it to one (`model.to(torch.float32)`), or set bf16=True"
        )
