"""The loss of a batch and the training step around it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.types import LossTerms
from windlass.metrics.tokens import IGNORE_INDEX
from windlass.trainer.base import TrainerBase


class LossMixin(TrainerBase):
    """`training_step` and `compute_loss`, and what is known about the latter."""

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of one micro-batch.

        Args:
            model: what to run the forward through; under data parallelism the wrapper.
            inputs: the collated batch, in host memory.
            num_items_in_batch: the update's target count over all micro-batches and ranks.

        Returns:
            Scalar tensor without gradient: the loss as `compute_loss` gave it.
        """
        if not model.training:
            model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self._call_compute_loss(model, inputs, num_items_in_batch)
        total = loss.sum if isinstance(loss, LossTerms) else loss
        if not total.requires_grad:
            raise ModelError(
                "the loss carries no gradient: it was detached, computed under torch.no_grad(), or comes from no "
                "parameter that trains"
            )
        self.accelerator.backward(loss)
        return total.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of one batch: a scalar tensor, or `LossTerms`. Override it for a loss of your own.

        An override may leave out `num_items_in_batch` and return the batch's mean; Windlass then weighs it by the
        batch's target count. With `return_outputs=True` it returns `(loss, outputs)`.

        Raises:
            ModelError: the model returned no loss.
        """
        labels = None
        if (self.args.label_smoothing_factor or self.compute_loss_func is not None) and "labels" in inputs:
            inputs = dict(inputs)
            labels = inputs.pop("labels")
        if self._model_divides and num_items_in_batch is not None and labels is None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = call_model(model, inputs)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif labels is not None:
            loss = smoothed_loss(
                outputs, labels, self.args.label_smoothing_factor, self._counter.shifted, num_items_in_batch
            )
        else:
            loss = loss_of(outputs, inputs)
        if self._default_loss_scales and num_items_in_batch is not None:
            loss = loss * self._gang.size
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """What the forward and the loss run in: mixed precision."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """The mixed-precision context of this run; null for fp32."""
        return self._autocast()

    def count_targets(self, batch: Any) -> float:
        """How many targets this batch's loss is a mean over. Override it where labels do not tell (see
        docs/losses.md).

        Called with batches in host memory, before their forward.
        """
        return self._counter(batch)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], Tensor]:
        """Up to `num_batches` batches of an iterator, and the number of targets in them over all ranks. For scripts
        that call it; the engine gets its micro-batches from the loader.
        """
        batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device | None = None) -> Tensor:
        """Targets in these batches over all ranks, as a scalar on `device`. Collective."""
        own = torch.tensor(sum(map(self.count_targets, batch_samples)), dtype=torch.float64)
        return as_count(float(self._gang.sum(own)), device or self._device)

    def _prepare_input(self, data: Any) -> Any:
        """`data` with every tensor in it moved to this process's device."""
        if isinstance(data, Tensor):
            return data if data.device == self._device else data.to(self._device, non_blocking=True)
        if isinstance(data, Mapping):
            moved = {key: self._prepare_input(value) for key, value in data.items()}
            return moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*(self._prepare_input(value) for value in data))
        if isinstance(data, (list, tuple)):
            return type(data)(self._prepare_input(value) for value in data)
        return data

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch on this process's device, as a new container: hooks may take labels out of it.

        Raises:
            ModelError: the batch is empty.
        """
        inputs = self._prepare_input(inputs)
        if isinstance(inputs, (Mapping, list, tuple)) and len(inputs) == 0:
            known = ", ".join(self._signature_columns or []) or "unknown"
            raise ModelError(f"a batch came out empty; the model's forward takes: {known}")
        return inputs

    # --- what the loss means ----------------------------------------------------------------------------------------

    def _call_compute_loss(self, model: nn.Module, inputs: Any, denominator: Any) -> Any:
        if self._compute_loss_takes_denominator:
            return self.compute_loss(model, inputs, num_items_in_batch=denominator)
        return self.compute_loss(model, inputs)

    def _inspect_hooks(self) -> None:
        """Read the signatures of the overridable hooks once. The guides' three-argument `compute_loss` is welcome."""
        self._compute_loss_takes_denominator = takes(self.compute_loss, "num_items_in_batch")
        self._training_step_takes_denominator = takes(self.training_step, "num_items_in_batch")

    @property
    def _own_loss(self) -> bool:
        """Whether `compute_loss` is the one of this class."""
        return type(self).compute_loss is LossMixin.compute_loss and "compute_loss" not in vars(self)

    @property
    def loss_takes_denominator(self) -> bool:
        """Whether a training step has any use for the update's target count."""
        if not self._compute_loss_takes_denominator or not self._training_step_takes_denominator:
            return False
        own = self._own_loss and type(self).training_step is LossMixin.training_step
        smooths = bool(self.args.label_smoothing_factor)
        return not own or smooths or self.compute_loss_func is not None or self._model_divides


# --- plain functions ------------------------------------------------------------------------------------------------


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Run a batch through a model: a mapping by keyword, a sequence by position, anything else as the one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (list, tuple)):
        return model(*inputs)
    return model(inputs)


def loss_of(outputs: Any, inputs: Any) -> Any:
    """The loss in what a model returned: `outputs["loss"]`, the first of a tuple, an attribute, or a bare scalar.

    Raises:
        ModelError: there is none.
    """
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)):
        loss = outputs[0] if outputs else None
    elif isinstance(outputs, (Tensor, LossTerms)):
        loss = outputs
    else:
        loss = getattr(outputs, "loss", None)
    if not isinstance(loss, LossTerms) and not (isinstance(loss, Tensor) and loss.numel() == 1):
        found = _shown(outputs)
        if loss is not None:
            found += f", where the loss should be {_kind_of(loss)}"
        received = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
        raise ModelError(
            f"the model returned no loss (it returned: {found}; it received: {received}). Give it labels, let its "
            "forward return the loss first or as 'loss', pass `compute_loss_func`, or override `compute_loss`"
        )
    return loss


def _shown(outputs: Any) -> str:
    """What a model returned, for an error."""
    if isinstance(outputs, Mapping):
        return ", ".join(f"{name} (None)" if outputs[name] is None else str(name) for name in outputs)
    if isinstance(outputs, (tuple, list)):
        return f"a sequence of {len(outputs)}"
    return "one tensor" if isinstance(outputs, Tensor) else type(outputs).__name__


def check_loss(loss: Any) -> Any:
    """The loss itself, if it is a scalar tensor or `LossTerms`.

    Raises:
        ModelError: it is something else.
    """
    if isinstance(loss, tuple) and loss:
        loss = loss[0]
    if isinstance(loss, LossTerms) or (isinstance(loss, Tensor) and loss.numel() == 1):
        return loss
    raise ModelError(
        f"`compute_loss` returned {_kind_of(loss)}; it must return a scalar tensor or LossTerms(sum, weight)"
    )


def _kind_of(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def smoothed_loss(outputs: Any, labels: Tensor, epsilon: float, shifted: bool, denominator: Any) -> Tensor:
    """Label-smoothed cross entropy (Szegedy et al. 2016): `(1 - eps) * nll + eps * mean over classes of -log p`.

    Args:
        outputs: a mapping with `logits`, or a sequence that starts with them: [..., classes].
        labels: integers, -100 is left out.
        shifted: predict label t from position t-1.
        denominator: what the sum is divided by; None: the number of targets in this batch.
    """
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    if shifted:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    flat = logits.reshape(-1, logits.shape[-1])
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.float()  # as models do for their own loss: a sum over tokens has no room in so few digits
    reduction = "mean" if denominator is None else "sum"
    loss: Tensor = F.cross_entropy(
        flat, labels.reshape(-1), ignore_index=IGNORE_INDEX, label_smoothing=epsilon, reduction=reduction
    )
    return loss if denominator is None else loss / denominator


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a callable accepts the keyword `name`."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def as_count(value: float, device: torch.device) -> Tensor:
    """A count as a scalar tensor on `device`, made there: no copy that the host would wait for."""
    whole = float(value).is_integer()
    return torch.full(
        (), int(value) if whole else value, dtype=torch.int64 if whole else torch.float32, device=device
    )
