"""Parts of an evaluation: the exact mean loss, splitting outputs into loss and predictions, names of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.metric_values import plain_metrics
from windlass.core.trees import detach
from windlass.core.types import CACHES, LossTerms

logger = get_job_logger(__name__)

Loss = Tensor | LossTerms | float | None


class MeanLoss:
    """Mean loss over the targets of all batches of all ranks: sum(loss_i * weight_i) / sum(weight_i).

    Sums stay on the device of the losses, in fp64 (fp32 if the device has none), until `totals`.
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
        """Add one batch.

        Args:
            loss: mean over the targets of the batch (averaged unless it is a scalar), or exact terms; None if the
                batch has no labels.
            weight: number of targets of a mean. A mean over none, NaN in most models, is ignored.
            samples: number of samples, the weight of auxiliary terms.
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
        else:  # on the host already: no host sync
            self._plain_weight += float(terms.weight)
            total = total if float(terms.weight) else torch.zeros_like(total)
        self._sum = _plus(self._sum, total)
        terms.check_names()
        for name, value in terms.aux.items():
            self._aux[name] = _plus(self._aux.get(name), _wide(value) * samples)

    def totals(self) -> dict[str, Any]:
        """The sums of this rank as numbers. The one host sync."""
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
    """The mean loss of all ranks from their `MeanLoss.totals`; the same bits on every rank. Raises ModelError if some
    batches have a loss and others do not.

    Returns:
        {"loss": ...} and the auxiliary terms by name (their means are part of the loss); {} if no batch had a loss.
        NaN if no batch had a target.
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
    """Correctly rounded sum; infinities of both signs add up to NaN instead of an error."""
    numbers = list(values)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else float(sum(numbers))


def ignored_keys(model: Any) -> list[str]:
    """Names of outputs that are not predictions, by the model's config; caches if it has none."""
    config = getattr(model, "config", None)
    if config is None:
        return []
    named = list(getattr(config, "keys_to_ignore_at_inference", CACHES))
    # A config that was written for the one name meets models that return the other.
    return list(dict.fromkeys([*named, *CACHES])) if set(named) & set(CACHES) else named


def labels_of(batch: Mapping[str, Any], label_names: Sequence[str]) -> Any:
    """The labels of a batch, detached: a tensor for one name, a tuple for several, None if any is missing or for `()`.

    Read them before the loss is computed: some losses remove them from the batch.
    """
    labels = tuple(batch.get(name) for name in label_names)
    if not labels or any(label is None for label in labels):
        return None
    return detach(labels[0] if len(labels) == 1 else labels)


def split_outputs(outputs: Any, *, has_loss: bool, ignore_keys: Sequence[str] = ()) -> tuple[Any, Any]:
    """Split the output of a model into (loss, predictions).

    Args:
        outputs: a mapping (model output objects are), a tuple or list, a bare tensor, or an object whose attributes
            are the outputs.
        has_loss: the loss is among them: under "loss" in a mapping, first in a tuple.
        ignore_keys: names of entries of a mapping that are not predictions.

    Returns:
        The loss, if any, and the predictions, detached: a tuple, or its one element; None if the model returned the
        loss alone. Entries that are None are left out.
    """
    if not isinstance(outputs, Mapping | tuple | list | Tensor) and hasattr(outputs, "__dict__"):
        outputs = {name: value for name, value in vars(outputs).items() if not name.startswith("_")}
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss") if has_loss else None
        names = {ignore_keys} if isinstance(ignore_keys, str) else set(ignore_keys)
        left_out = {*names, "loss"} if has_loss else names
        parts = [value for key, value in outputs.items() if key not in left_out]
    elif isinstance(outputs, tuple | list):
        loss = outputs[0] if has_loss and outputs else None
        parts = list(outputs[1:] if has_loss else outputs)
    else:
        loss, parts = None, [outputs]
    predictions = tuple(detach(part) for part in parts if part is not None)
    return detach(loss), predictions[0] if len(predictions) == 1 else predictions or None


def checked_metrics(result: Any) -> dict[str, Any]:
    """Return the result of `compute_metrics` as a dict. Raises ConfigError if it is not a mapping."""
    if not isinstance(result, Mapping):
        fix = 'must return a dict of names and numbers, such as {"accuracy": 0.9}'
        raise ConfigError(Problem("compute_metrics", type(result).__name__, fix))
    return dict(result)


def named_metrics(prefix: str, loss: Mapping[str, float], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """All metrics as plain data, their names prefixed with `prefix_` once. The loss replaces a metric of its name."""
    returned = {_prefixed(prefix, str(name)): value for name, value in metrics.items()}
    named = plain_metrics(returned, "compute_metrics")
    exact = {_prefixed(prefix, name): value for name, value in loss.items()}
    for name in sorted(named.keys() & exact.keys()):
        logger.warning(
            "compute_metrics returned %s, which is the name of the evaluation loss: the loss is kept", name
        )
    return {**exact, **named, **exact}  # the loss comes first


def _prefixed(prefix: str, name: str) -> str:
    return name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
