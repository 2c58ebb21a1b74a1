"""The loss of a model without its logits: decided before the first update, on its first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from windlass.core.logs import get_job_logger, get_logger, warn_once
from windlass.engine.undisturbed import undisturbed
from windlass.transforms.lean_head import InexactLossError, LeanHead, coefficient_of, head_of
from windlass.transforms.lean_loss import is_compiled, whole_loss
from windlass.transforms.linear_cross_entropy import LossOptions
from windlass.transforms.short_sample import short_sample
from windlass.transforms.staged_model import staged_of

logger = get_logger(__name__)

# Hooks of these packages exchange parameters and gradients, and read no outputs.
_ENGINES = ("torch", "windlass", "deepspeed")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


class WithoutLogits:
    """Whether a Trainer's loss is made without logits, and that loss.

    The outputs of a training forward are not read unless a script overrides the loss or hooks into the modules that
    return logits. For a model whose head is a plain linear layer, the loss is then made of the hidden states. It is
    compared with the model's own loss once, on a part of the first batch.

    Attributes:
        used: the loss is made without logits.
        reason: why logits are made; None if they are not, or if the model has no head that is wider than its input.

    Args:
        sum_over_ranks: sums a host tensor over the ranks of the loss.
    """

    def __init__(self, device: torch.device, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        self._device, self._sum_over_ranks = device, sum_over_ranks
        self.reason: str | None = None
        self.forget()

    def forget(self) -> None:
        """Make logits, until the next decision."""
        self.used, self.reason = False, None
        self._head: LeanHead | None = None
        self._core: nn.Module | None = None
        self._readers: tuple[nn.Module, ...] = ()

    @property
    def shifts(self) -> bool | None:
        """True if label t is predicted at position t-1; None if logits are made."""
        return self._head.shifts if self.used and self._head is not None else None

    def facts(self) -> dict[str, Any]:
        """What the record of a run shows; empty if nothing was to be decided."""
        if self._head is not None:
            return {"without_logits": True, "difference": self._head.difference}
        return {} if self.reason is None else {"without_logits": False, "reason": self.reason}

    def decide(self, model: nn.Module, inputs: Any, refused: str | None) -> None:
        """Decide for a run, on its first batch. Collective.

        Args:
            model: the bare model, in the precision in which it is trained.
            inputs: the batch, on the model's device.
            refused: why the run makes logits, whatever the model is; None: it need not.
        """
        self.forget()
        core = _core_of(model)
        if core is None:
            return
        self._core = core
        self._readers = tuple(_modules_around(model, head_of(core)))
        reason = refused or self._read_by(model)
        if reason is None and is_compiled(model, core):
            reason = "the model is compiled as a whole (torch_compile_blocks=True compiles its blocks)"
        if reason is None:
            reason = self._measured(model, core, inputs)
        self.used, self.reason = reason is None, reason
        self._report(core)

    def _measured(self, model: nn.Module, core: nn.Module, inputs: Any) -> str | None:
        found: str | None = None
        try:
            if not isinstance(inputs, Mapping) or not isinstance(inputs.get("labels"), Tensor):
                raise InexactLossError("the batch has no labels")
            staged = staged_of(core)
            if staged is not None:  # measured when it was whole
                self._head = staged.lean_head
                if self._head is None:
                    raise InexactLossError("on eight tokens another loss differs")
            else:
                with undisturbed(model, self._device):
                    self._head = LeanHead.measured(model, core, short_sample(inputs))
        except InexactLossError as error:
            found = str(error)
        failed = float(self._sum_over_ranks(torch.tensor([float(found is not None)], dtype=torch.float64)))
        if failed:
            self._head = None
            found = found or "it differs on another process"
        return found

    def _report(self, core: nn.Module) -> None:
        said, name = get_job_logger(__name__), type(core).__name__
        if self._head is None:
            said.info("the loss of %s is its own, of whole logits: %s", name, self.reason)
            return
        said.info(
            "the loss of %s is made without its logits (lean_loss); on a part of the first batch it differs from the "
            "model's own by %.1e of it",
            name,
            self._head.difference,
        )

    def loss(
        self, model: nn.Module, inputs: Any, count: Tensor | float | None, smoothing: float
    ) -> Tensor | None:
        """The loss of a batch without logits; None if the model has to make them.

        Args:
            model: the model of the decision, or what wraps it.
            inputs: a batch on the model's device.
            count: divides the sum of losses; None: the number of targets.
            smoothing: `label_smoothing_factor`. A smoothed loss has no auxiliary one.
        """
        if not self.used or self._head is None or self._core is None:
            return None
        if not isinstance(inputs, Mapping) or inputs.get("labels") is None or not _wraps(model, self._core):
            return None
        staged = staged_of(self._core)
        if staged is not None and not staged.in_step:
            return None  # a forward of all stages returns logits
        reason = self._read_by(model)
        try:
            if reason is not None:
                raise InexactLossError(reason)
            sums = self._head.loss(model, inputs, LossOptions(label_smoothing=smoothing))
        except InexactLossError as error:
            warn_once(logger, f"lean_loss: the model makes its logits in some steps: {error}")
            return None
        return whole_loss(sums, count, 0.0 if smoothing else coefficient_of(self._core))

    def _read_by(self, model: nn.Module) -> str | None:
        """Why a forward's outputs are read; None if they are not."""
        for module in (model, *self._readers):
            for name in _HOOKS:
                for hook in (getattr(module, name, None) or {}).values():
                    if not _is_of_engine(hook):
                        return f"{type(module).__name__} has a hook of {_package_of(hook)}"
        for name in _GLOBAL_HOOKS:
            for hook in getattr(torch_modules, name, {}).values():
                if not _is_of_engine(hook):
                    return f"all modules have a hook of {_package_of(hook)}"
        return None


def _core_of(model: nn.Module) -> nn.Module | None:
    """The outermost module that has a head which is wider than its input; None if there is none."""
    for module in model.modules():
        if callable(getattr(type(module), "get_output_embeddings", None)):
            head = head_of(module)
            sizes = getattr(head, "out_features", 0), getattr(head, "in_features", 0)
            return module if all(isinstance(size, int) for size in sizes) and sizes[0] > sizes[1] else None
    return None


def _modules_around(model: nn.Module, head: nn.Module) -> Iterator[nn.Module]:
    """The head, and the modules that it is part of: their outputs may have logits in them."""
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is head]
    return (
        module
        for name, module in model.named_modules(remove_duplicate=False)
        if any(path == name or path.startswith(f"{name}." if name else "") for path in names)
    )


def _wraps(model: nn.Module, core: nn.Module) -> bool:
    return model is core or any(module is core for module in model.modules())


def _package_of(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or type(hook).__module__


def _is_of_engine(hook: Any) -> bool:
    return _package_of(hook).split(".")[0] in _ENGINES
