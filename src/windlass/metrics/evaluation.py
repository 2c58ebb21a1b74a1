"""The parts of an evaluation: the exact mean loss, which outputs are loss and which predictions, names of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.logs import get_logger
from windlass.core.metric_values import plain_metrics
from windlass.core.trees import detach
from windlass.core.types import LossTerms

logger = get_logger(__name__)

Loss = Tensor | LossTerms | float | None


class MeanLoss:
    """Mean loss over the targets of all batches of all ranks: sum(loss_i * weight_i) / sum(weight_i).

    Sums stay on the device of the losses, in fp64 (fp32 where the device has none); nothing is read before `totals`.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._weight: Tensor | None = None
        self._plain_weight = 0.0
        self._aux: dict[str, Tensor] = {}
        self._samples = 0
        self._with_loss = 0
        self._without = 0

    def add(self, loss: Loss, weight: float, samples: int) -> None:
        """Count one batch.

        Args:
            loss: mean over the batch's targets (anything but a scalar is averaged), or exact terms; None where the
                batch has no labels.
            weight: number of targets behind a mean. A mean over none, NaN in most models, counts nothing.
            samples: number of samples, by which auxiliary terms are weighted.
        """
        if loss is None:
            self._without += 1
            return
        self._with_loss += 1
        self._samples += samples
        if isinstance(loss, LossTerms):
            self._add_terms(loss, samples)
            return
        self._plain_weight += weight
        if weight != 0:
            self._sum = _plus(self._sum, _wide(loss) * weight)

    def _add_terms(self, terms: LossTerms, samples: int) -> None:
        total = _wide(terms.sum)
        if isinstance(terms.weight, Tensor) and terms.weight.device == total.device:
            weight = _wide(terms.weight)
            self._weight = _plus(self._weight, weight)
            total = torch.where(weight == 0, torch.zeros_like(total), total)
        else:  # known on the host: no need to wait for the device
            self._plain_weight += float(terms.weight)
            total = total if float(terms.weight) else torch.zeros_like(total)
        self._sum = _plus(self._sum, total)
        for name, value in terms.aux.items():
            self._aux[name] = _plus(self._aux.get(name), _wide(value) * samples)

    def totals(self) -> dict[str, Any]:
        """This rank's sums as numbers that JSON can carry; the one place that waits for the device."""
        return {
            "sum": _read(self._sum),
            "weight": self._plain_weight + _read(self._weight),
            "aux": {name: value.item() for name, value in self._aux.items()},
            "samples": self._samples,
            "with_loss": self._with_loss,
            "without": self._without,
        }


def _wide(value: Any) -> Tensor:
    tensor = torch.as_tensor(value).detach()
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    return tensor.to(wide).mean() if tensor.ndim else tensor.to(wide)


def _plus(total: Tensor | None, value: Tensor) -> Tensor:
    return value.clone() if total is None else total.add_(value.to(total.device))


def _read(value: Tensor | None) -> float:
    return 0.0 if value is None else float(value.item())


def mean_of(totals: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean loss of all ranks from their `MeanLoss.totals`; the same bits on every rank.

    Returns:
        {"loss": ...} with the auxiliary terms by name beside it (their means are part of the loss); {} where no batch
        had a loss. NaN where there were batches but no target at all.

    Raises:
        ModelError: some batches have a loss and some have none.
    """
    with_loss, without = sum(t["with_loss"] for t in totals), sum(t["without"] for t in totals)
    if with_loss and without:
        raise ModelError(
            f"{without} of {with_loss + without} evaluation batches have no loss: are labels missing there?"
        )
    if not with_loss:
        return {}
    weight, samples = _sum(t["weight"] for t in totals), sum(t["samples"] for t in totals)
    if weight == 0:
        logger.warning(
            "the evaluation data holds no target (every label is ignored), so its loss is undefined: NaN"
        )
    names = sorted({name for t in totals for name in t["aux"]})
    aux = {name: _sum(t["aux"].get(name, 0.0) for t in totals) / samples for name in names} if samples else {}
    mean = _sum(t["sum"] for t in totals) / weight if weight else math.nan
    return {"loss": _sum([mean, *aux.values()]), **aux}


def _sum(values: Any) -> float:
    """Correctly rounded, and quiet about infinities of both signs, which add up to NaN."""
    numbers = list(values)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else float(sum(numbers))


def ignored_keys(model: Any) -> list[str]:
    """Names of outputs that are no predictions, as the model's config says; caches where it says nothing."""
    config = getattr(model, "config", None)
    return (
        list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))
        if config is not None
        else []
    )


def labels_of(batch: Mapping[str, Any], label_names: Sequence[str]) -> Any:
    """The batch's labels, detached: a tensor for one name, a tuple for several, None where any of them is missing.

    Read them before the loss is computed: some losses take them out of the batch. Where the loss needs no labels, the
    caller says so with `()`.
    """
    labels = tuple(batch.get(name) for name in label_names)
    if not labels or any(label is None for label in labels):
        return None
    return detach(labels[0] if len(labels) == 1 else labels)


def split_outputs(outputs: Any, *, has_loss: bool, ignore_keys: Sequence[str] = ()) -> tuple[Any, Any]:
    """Divide what a model returned into (loss, predictions).

    Args:
        outputs: a mapping (model output objects are), a tuple or list, a bare tensor, or an object whose attributes
            are the outputs.
        has_loss: the loss is among them: under "loss" in a mapping, first in a tuple.
        ignore_keys: names of a mapping's entries that are no predictions.

    Returns:
        The loss (None where there is none) and the predictions, detached: a tuple, or its one element unwrapped; None
        where the model returned nothing but the loss. Entries that are None are left out.
    """
    if not isinstance(outputs, Mapping | tuple | list | Tensor) and hasattr(outputs, "__dict__"):
        outputs = {name: value for name, value in vars(outputs).items() if not name.startswith("_")}
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss") if has_loss else None
        left_out = {*ignore_keys, "loss"} if has_loss else set(ignore_keys)
        parts = [value for key, value in outputs.items() if key not in left_out]
    elif isinstance(outputs, tuple | list):
        loss = outputs[0] if has_loss and outputs else None
        parts = list(outputs[1:] if has_loss else outputs)
    else:
        loss, parts = None, [outputs]
    predictions = tuple(detach(part) for part in parts if part is not None)
    return detach(loss), _unwrapped(predictions)


def _unwrapped(parts: tuple[Any, ...]) -> Any:
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts


def checked_metrics(result: Any) -> dict[str, Any]:
    """What `compute_metrics` returned.

    Raises:
        ConfigError: it is no mapping.
    """
    if not isinstance(result, Mapping):
        fix = 'must return a dict of names and numbers, such as {"accuracy": 0.9}'
        raise ConfigError(Problem("compute_metrics", type(result).__name__, fix))
    return dict(result)


def named_metrics(prefix: str, loss: Mapping[str, float], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """All metrics as plain data, with `prefix_` before their names (once). The loss replaces a metric of its name."""
    named = plain_metrics({_prefixed(prefix, str(name)): value for name, value in metrics.items()})
    exact = {_prefixed(prefix, name): value for name, value in loss.items()}
    for name in sorted(named.keys() & exact.keys()):
        logger.warning(
            "compute_metrics returned %s, which is the name of the evaluation loss: the loss is kept", name
        )
    return {**exact, **named, **exact}  # the loss first, where scripts and readers look for it


def _prefixed(prefix: str, name: str) -> str:
    return name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
