"""The reference that a model is compared with: a second model, the adapter switched off, or numbers of the batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError, Problem
from windlass.finetuning.answer_log_probabilities import answer_log_probabilities
from windlass.finetuning.peft_adapters import is_peft_model
from windlass.finetuning.reference_config import ReferenceConfig
from windlass.finetuning.tuned_model import TunedModel
from windlass.transforms.evaluating import evaluating

REFERENCE_ADAPTER = "ref"


class Reference:
    """Computes log-probabilities of answers under the reference. Subclasses define `_model`.

    Args:
        is_fixed: the reference has no dropout in training mode either, so its mode need not be changed.
    """

    def __init__(self, is_fixed: bool) -> None:
        self._is_fixed = is_fixed

    @contextlib.contextmanager
    def _model(self, trained: nn.Module) -> Iterator[nn.Module]:
        """Context in which the yielded module is the reference. `trained` is the model, in its wrappers."""
        raise NotImplementedError
        yield

    def log_probabilities(
        self, trained: nn.Module, inputs: Mapping[str, Any], ld_alpha: float | None = None
    ) -> Tensor:
        """The log-probability of each answer, shape (rows,); see `answer_log_probabilities`."""
        with self._model(trained) as model, torch.no_grad():
            with contextlib.nullcontext() if self._is_fixed else evaluating(model):
                return answer_log_probabilities(model, inputs, ld_alpha).sums


class SecondModel(Reference):
    """A frozen model beside the trained one. `module` is prepared for the devices of the run."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(is_fixed=True)
        self.module = module

    @contextlib.contextmanager
    def _model(self, trained: nn.Module) -> Iterator[nn.Module]:
        yield self.module


class WithoutAdapter(Reference):
    """The trained model with its adapter switched off, or with the copy of the adapter that training began with.

    Args:
        adapted: the peft model.
    """

    def __init__(self, adapted: Any, is_fixed: bool) -> None:
        super().__init__(is_fixed)
        self._adapted = adapted

    @contextlib.contextmanager
    def _model(self, trained: nn.Module) -> Iterator[nn.Module]:
        adapted = self._adapted
        if REFERENCE_ADAPTER not in adapted.peft_config:
            with adapted.disable_adapter():
                yield trained
            return
        before = adapted.active_adapter
        trainable = {parameter for parameter in adapted.parameters() if parameter.requires_grad}
        adapted.set_adapter(REFERENCE_ADAPTER)
        try:
            yield trained
        finally:
            adapted.set_adapter(before)
            for parameter in adapted.parameters():  # peft makes the weights of the active adapter trainable
                parameter.requires_grad_(parameter in trainable)


class FirstModel(Reference):
    """The trained model itself, before it is trained."""

    @contextlib.contextmanager
    def _model(self, trained: nn.Module) -> Iterator[nn.Module]:
        yield trained


@dataclass(frozen=True, slots=True)
class ReferenceChoice:
    """Which reference a trainer has. A model that it is copied from is copied when this is made."""

    model: nn.Module  # the trained one
    given: nn.Module | None  # the reference that the script passed
    is_fixed: bool  # no model has dropout
    precomputed: bool  # the reference is needed before training alone

    @property
    def source(self) -> nn.Module:
        """The module that the reference's weights are in."""
        return self.model if self.given is None else self.given

    def prepared(
        self, accelerator: Any, in_stages: Callable[[nn.Module], bool], *, sharded: bool = False
    ) -> Reference:
        """The reference, on the devices of the run. Collective.

        Args:
            in_stages: divides a model into the stages of a pipeline; returns False without one.
            sharded: models are divided over ranks when they are prepared.
        """
        if self.given is not None:
            given = freeze(self.given)
            return SecondModel(given if in_stages(given) else accelerator.prepare(given))
        if is_peft_model(self.model):
            return WithoutAdapter(self.model, self.is_fixed)
        if self.precomputed and not sharded:
            return FirstModel(self.is_fixed)
        return SecondModel(accelerator.prepare(frozen_copy(self.model)))


def choose_reference(
    ref_model: nn.Module | None, base: TunedModel, args: ReferenceConfig, *, had_adapter: bool
) -> ReferenceChoice:
    """Decide what the model is compared with, and set dropout to 0 if that is asked for.

    Args:
        ref_model: the reference that the script passes, if it does.
        had_adapter: the script passes a model that has an adapter, which is trained further.

    Raises:
        ConfigError: the reference is the model itself, or it cannot be moved as `sync_ref_model` asks.
    """
    if ref_model is base.model:
        fix = "`model` and `ref_model` cannot be the same object; leave it out, and a copy of `model` is made for you"
        raise ConfigError(Problem("ref_model", type(ref_model).__name__, fix))
    adapted = is_peft_model(base.model) and ref_model is None
    if args.sync_ref_model and adapted:
        fix = "needs a reference of its own, and with an adapter it is the model without it; leave it out"
        raise ConfigError(Problem("sync_ref_model", True, fix))
    if args.disable_dropout:
        for model in (base.model, ref_model):
            if model is not None:
                without_dropout(model)
    if adapted and had_adapter:
        keep_adapter(base.model)
    return ReferenceChoice(base.model, ref_model, args.disable_dropout, args.precompute_ref_log_probs)


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` as it is now, which is not trained."""
    return freeze(copy.deepcopy(model))


def freeze(model: nn.Module) -> nn.Module:
    """`model`, in evaluation mode and without gradients."""
    return model.eval().requires_grad_(False)


def keep_adapter(model: Any) -> None:
    """Add a frozen copy of the active adapter to a peft model, for the reference. A second call changes nothing."""
    if REFERENCE_ADAPTER in model.peft_config:
        return
    active = str(model.active_adapter)
    trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
    model.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(model.peft_config[active]))
    model.set_adapter(active)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            twin = own.get(name.replace(f".{active}.", f".{REFERENCE_ADAPTER}."))
            if twin is not None and twin is not parameter:
                twin.copy_(parameter)
            parameter.requires_grad_(parameter in trainable)


def without_dropout(model: nn.Module) -> None:
    """Set all dropout of a model to 0: its layers, and the shares that attention reads from its modules."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
