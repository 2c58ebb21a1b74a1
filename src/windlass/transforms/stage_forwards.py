"""Forwards without gradients through all stages of a pipeline: every rank gets what the last stage returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.tensors import dtype_name
from windlass.transforms.stage_link import StageLink

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a forward, which all ranks have."""

# Errors that scripts and measurements catch by their class, on whichever rank they were raised.
_BUILT_IN = {kind.__name__: kind for kind in (TypeError, ValueError, KeyError, IndexError)}


class StageForwards:
    """Runs forwards. A rank goes on to the next one while later stages compute the last.

    Args:
        placement: for each stage the rank that computes it, as an index in the pipeline.
        compute: stage, what it begins with, arguments of the model -> what the stage ends with.
    """

    def __init__(
        self,
        link: StageLink,
        placement: Sequence[int],
        compute: Callable[[int, Tensor | None, Call], Any],
    ) -> None:
        self._link, self._placement, self._compute = link, placement, compute
        self._local = [stage for stage, rank in enumerate(placement) if rank == link.ranks.rank]
        self._handed: Tensor | None = None  # from one stage of this rank to the next

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """The results of the last stage, as plain tensors and nests of them. Collective. An error of a stage is raised
        on all ranks.
        """
        results: list[Any] = []
        described: list[Any] = []  # of the results, on the rank of the last stage
        error: Exception | None = None
        for call in calls:
            result: Any = None
            for stage in self._local:
                result, error = self._stage(stage, call, error, described)
            results.append(result)
        self._link.settle()
        ranks, last = self._link.ranks, self._placement[-1]
        found = ranks.gather_objects(
            [None if error is None else [type(error).__name__, str(error)], described]
        )
        if error is not None:
            raise error
        for failed, _ in found:
            if failed is not None:
                raise _BUILT_IN.get(failed[0], ModelError)(failed[1])
        return [self._shared(*pair) for pair in zip(results, found[last][1], strict=True)]

    def _stage(
        self, stage: int, call: Call, error: Exception | None, described: list[Any]
    ) -> tuple[Any, Exception | None]:
        received, result = self._received(stage), None
        if error is None and (stage == 0 or received is not None):
            try:
                result = self._compute(stage, received, call)
                if stage == len(self._placement) - 1:
                    described.append(_described(result))
            except Exception as raised:
                # Raised once all ranks know of it: the next stage waits for a tensor, or to hear that there is none.
                error = raised
        self._pass_on(stage, result)
        return result, error

    def _received(self, stage: int) -> Tensor | None:
        """What a stage begins with; None if an earlier one failed."""
        if stage == 0 or stage - 1 in self._local:
            return self._handed
        return self._link.receive(self._placement[stage - 1])

    def _pass_on(self, stage: int, tensor: Tensor | None) -> None:
        if stage == len(self._placement) - 1:
            return
        if stage + 1 in self._local:
            # None, too: by it the next stage learns that this one failed.
            self._handed = tensor
            return
        self._link.send(tensor, self._placement[stage + 1])

    def _shared(self, result: Any, described: Any) -> Any:
        kind, entries = described
        last, ranks = self._placement[-1], self._link.ranks
        values: dict[Any, Tensor] = {}
        for key, dtype, shape in entries:
            if ranks.rank == last:
                value = output_tensors(result)[key].contiguous()
            else:
                value = torch.empty(shape, dtype=getattr(torch, dtype), device=self._link.device)
            torch.distributed.broadcast(value, ranks.members[last], group=ranks.device_group)
            values[key] = value
        if kind == "tensor":
            return values[0]
        return tuple(values.values()) if kind == "tuple" else StageOutput(values)


def output_tensors(result: Any) -> dict[Any, Tensor]:
    """The tensors of an output, by name or position. What is not a tensor, as caches, is left out."""
    if isinstance(result, Tensor):
        return {0: result}
    pairs = result.items() if isinstance(result, Mapping) else enumerate(result)
    return {key: value for key, value in pairs if isinstance(value, Tensor)}


def _described(result: Any) -> list[Any]:
    """The kind of an output, and name, dtype and shape of its tensors. Raises ModelError for one of another kind."""
    if not isinstance(result, Tensor | Mapping | tuple | list):
        raise ModelError(
            f"the forward of the model returns a {type(result).__name__}, of which the ranks of a pipeline cannot send "
            "each other the tensors: return a tensor, or a mapping or tuple of tensors, or set pp_size=1"
        )
    kind = "tensor" if isinstance(result, Tensor) else "mapping" if isinstance(result, Mapping) else "tuple"
    described = [
        [key, dtype_name(value.dtype), list(value.shape)] for key, value in output_tensors(result).items()
    ]
    return [kind, described]


class StageOutput(dict[Any, Tensor]):
    """The tensors of a model's output by name, as attributes and by position too."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            found: Tensor = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return found

    def __getitem__(self, key: Any) -> Any:
        return self.to_tuple()[key] if isinstance(key, int | slice) else super().__getitem__(key)

    def to_tuple(self) -> tuple[Tensor, ...]:
        """The tensors in order."""
        return tuple(self.values())
