"""Losses as plain functions: the defaults of `training_step` and `compute_loss`, and their parts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.core.device import copies_may_wait
from windlass.core.errors import ModelError
from windlass.core.trees import honor_type, mapping_like
from windlass.core.types import IGNORED, LossTerms


class NoLossError(ModelError):
    """A model returned no loss."""


def check_differentiable(loss: Any) -> Tensor:
    """Return the tensor to differentiate, of a loss or `LossTerms`. Raises ModelError if it has no gradient, or several
    elements.
    """
    total: Tensor = loss.sum if isinstance(loss, LossTerms) else loss
    if total.numel() != 1:
        raise _not_a_loss(total)
    if not total.requires_grad:
        raise ModelError(
            "the loss carries no gradient: it was detached, computed under torch.no_grad(), or comes from no "
            "parameter that trains"
        )
    return total


def without_gradient(loss: Any) -> Any:
    """The loss of an evaluation, which has no gradient: a tensor or `LossTerms`."""
    return loss if isinstance(loss, LossTerms) else loss.detach()


def on_device(data: Any, device: torch.device, own: Callable[[Any], Any] | None) -> Any:
    """`data` with every tensor in it moved to `device`, in new containers of the same types.

    Args:
        own: a script's own `_prepare_input`, which is called for the items of a container.
    """
    if isinstance(data, Tensor):
        return data if data.device == device else data.to(device, non_blocking=copies_may_wait(device))
    move = functools.partial(on_device, device=device, own=None) if own is None else own
    if isinstance(data, Mapping):
        moved = {
            key: item if own is None and isinstance(item, Tensor) and item.device == device else move(item)
            for key, item in data.items()
        }
        return moved if type(data) is dict else mapping_like(data, moved)  # a dict in every update
    return honor_type(data, map(move, data)) if isinstance(data, (list, tuple)) else data


def empty_batch(columns: list[str] | None) -> ModelError:
    """The error of a batch without inputs, with the `columns` that the model takes."""
    known = ", ".join(columns or []) or "unknown"
    return ModelError(f"a batch is empty; the model's forward takes: {known}")


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Run a batch through a model: a mapping by keyword, a sequence by position, anything else as the one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (list, tuple)):
        return model(*inputs)
    return model(inputs)


def loss_of(outputs: Any, inputs: Any) -> Any:
    """The loss in the outputs of a model: `outputs["loss"]`, the first of a tuple, an attribute, or a bare scalar.
    Raises NoLossError if there is none.
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
        # The first element of a tuple, and a bare tensor, may be logits of a model that returns no loss.
        may_be_logits = isinstance(outputs, (Tensor, tuple, list))
        if isinstance(loss, Tensor) and not may_be_logits:
            raise ModelError(
                f"the model returned a loss of shape {tuple(loss.shape)}, and a loss is one number: return its mean, "
                "or LossTerms(sum, weight)"
            )
        found = _shown(outputs)
        if loss is not None:
            found += f", where the loss should be {_kind_of(loss)}"
        received = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
        raise NoLossError(
            f"the model returned no loss (it returned: {found}; it received: {received}). Give it labels, let its "
            "forward return the loss first or as 'loss', pass `compute_loss_func`, or override `compute_loss`"
        )
    return loss


def _shown(outputs: Any) -> str:
    """Describe the outputs of a model, for an error."""
    if isinstance(outputs, Mapping):
        return ", ".join(f"{name} (None)" if outputs[name] is None else str(name) for name in outputs)
    if isinstance(outputs, (tuple, list)):
        return f"a sequence of {len(outputs)}"
    return "one tensor" if isinstance(outputs, Tensor) else type(outputs).__name__


def check_loss(loss: Any) -> Any:
    """Return the loss, if it is a scalar tensor or `LossTerms`; raise ModelError otherwise."""
    if isinstance(loss, tuple) and loss:
        loss = loss[0]
    if isinstance(loss, LossTerms) or (isinstance(loss, Tensor) and loss.numel() == 1):
        return loss
    raise _not_a_loss(loss)


def _not_a_loss(value: Any) -> ModelError:
    return ModelError(
        f"`compute_loss` returned {_kind_of(value)}; it must return a scalar tensor or LossTerms(sum, weight)"
    )


def _kind_of(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def smoothed_loss(outputs: Any, labels: Tensor, epsilon: float, shifted: bool, denominator: Any) -> Tensor:
    """Label-smoothed cross entropy (Szegedy et al. 2016): `(1 - eps) * nll + eps * mean over classes of -log p`.

    Args:
        outputs: a mapping with `logits`, or a sequence that starts with them: [..., classes].
        labels: integers, -100 is left out.
        shifted: predict label t from position t-1.
        denominator: divisor of the sum; None: the number of targets in this batch.
    """
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    if shifted:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    flat = logits.reshape(-1, logits.shape[-1])
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.float()  # as models do for their own loss: a sum over tokens needs more digits
    reduction = "mean" if denominator is None else "sum"
    loss: Tensor = F.cross_entropy(
        flat, labels.reshape(-1), ignore_index=IGNORED, label_smoothing=epsilon, reduction=reduction
    )
    return loss if denominator is None else loss / denominator


@dataclass
class LabelSmoother:
    """Label-smoothed cross entropy of a model's logits, as an object that scripts call.

    Args:
        epsilon: the share that is spread over all classes.
        ignore_index: the label that is left out.
    """

    epsilon: float = 0.1
    ignore_index: int = IGNORED

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of one batch; see `smoothed_loss`, whose `denominator` is `num_items_in_batch`."""
        if self.ignore_index != IGNORED:
            labels = labels.masked_fill(labels == self.ignore_index, IGNORED)
        return smoothed_loss(model_output, labels, self.epsilon, shift_labels, num_items_in_batch)


def smoothing_of(factor: float, model: nn.Module) -> float:
    """`label_smoothing_factor`, or 0 for a model of independent labels, which it does not apply to."""
    kind = getattr(getattr(model, "config", None), "problem_type", None)
    if not factor or kind != "multi_label_classification":
        return factor
    warnings.warn(
        f"label_smoothing_factor={factor} is not used: the model's problem_type is {kind!r}", stacklevel=2
    )
    return 0.0


def as_count(value: float, device: torch.device) -> Tensor:
    """A count as a scalar tensor on `device`, created there: the host would wait for a copy."""
    # int64 as transformers passes it: a script may divide by it as a whole number, or compare it with one.
    whole = float(value).is_integer()
    return torch.full(
        (), int(value) if whole else value, dtype=torch.int64 if whole else torch.float32, device=device
    )
