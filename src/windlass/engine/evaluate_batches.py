"""Metrics that are fed batch by batch, so that no evaluation ever holds all predictions at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.trees import Spec, map_leaves, unflatten
from windlass.core.types import EvalPrediction
from windlass.dist.gang import Gang
from windlass.dist.lockstep import agree
from windlass.metrics.evaluation import checked_metrics
from windlass.metrics.joining import pad_concat, take_apart

Fields = dict[str, Any]


class NoBatchMetrics:
    """Stands in where metrics are computed at the end, or not at all."""

    def add(self, fields: Fields) -> None:
        pass

    def finish(self) -> None:
        return None


class BatchMetrics:
    """Calls `compute_metrics(EvalPrediction, compute_result=...)` once for each round of batches.

    A round is the n-th batch of every rank, joined in rank order (ranks that have run out add nothing), so every
    rank's metric sees all data and comes to the same result. This is the one collective that evaluation needs for
    each batch. Predictions are torch tensors, on the device where this rank's model left them.

    A batch waits for the next one, since only then it is known not to be the last: the call for the last one has
    `compute_result=True`, and what it returns are the metrics.

    Args:
        compute_metrics: the user's function.
        measurable: whether a round's fields can be measured; raises where they should be and cannot.
        gang: the ranks.
    """

    def __init__(
        self, compute_metrics: Callable[..., Any], measurable: Callable[[Fields], bool], gang: Gang
    ) -> None:
        self._compute = compute_metrics
        self._measurable = measurable
        self._gang = gang
        self._waiting: Fields | None = None
        self._device = torch.device("cpu")
        self._result: dict[str, Any] = {}

    def add(self, fields: Fields) -> None:
        """Take this rank's next batch."""
        if self._waiting is not None:
            self._round(more=True)
        self._waiting = {name: map_leaves(_kept, tree) for name, tree in fields.items()}

    def finish(self) -> dict[str, Any]:
        """Take part in rounds until every rank has run out; the metrics of the last one."""
        while self._round(more=False):
            pass
        return self._result

    def _round(self, *, more: bool) -> bool:
        """One round over all ranks. Returns whether any rank has a further batch."""
        fields, self._waiting = self._waiting, None
        spec, leaves = take_apart(fields)
        messages = agree(self._gang, {"spec": spec, "more": more})
        others_more = any(message["more"] for message in messages)
        joined = self._joined([message["spec"] for message in messages], leaves)
        if joined is not None and self._measurable(joined):
            result = self._compute(EvalPrediction(**joined), compute_result=not others_more)
            if not others_more:
                self._result = checked_metrics(result)
        return others_more

    def _joined(self, specs: list[Spec], leaves: list[Tensor]) -> Fields | None:
        """The round's fields over all ranks; None where no rank had a batch."""
        seen = [spec for spec in specs if spec is not None]
        if not seen:
            return None
        if any(spec != seen[0] for spec in seen):
            raise ModelError(
                "batch_eval_metrics: the ranks' batches differ in structure and cannot be joined"
            )
        if leaves:
            self._device = leaves[0].device
        parts: dict[int, list[Tensor]] = {}
        for _, index, tensor in self._gang.stream(leaves):
            parts.setdefault(index, []).append(tensor.to(self._device))
        tree = unflatten(seen[0], [pad_concat(parts[index]) for index in sorted(parts)])
        assert isinstance(tree, dict)
        return tree


def _kept(tensor: Tensor) -> Tensor:
    """A copy that the next forward cannot overwrite while it waits."""
    return tensor.detach().clone()
