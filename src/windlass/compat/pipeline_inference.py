"""Inference through a pipeline: each process computes some of the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from windlass.compat.state import PartialState
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.trees import map_leaves, tensors_in
from windlass.dist.gang import current
from windlass.transforms.pipeline_cut import find_cut
from windlass.transforms.stage_balance import StageBalance
from windlass.transforms.stage_forwards import Call, StageOutput
from windlass.transforms.staged_model import StagedModel


def prepare_pippy(
    model: nn.Module,
    split_points: Literal["auto"] | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Divide the layers of `model` among all processes, for forwards without gradients. Collective.

    Every process calls the model with the same batch, which passes through the stages in chunks of rows. The model is
    changed in place: each process keeps the parameters of its stage.

    Args:
        split_points: the names of the modules with which the second and later stages begin; "auto" shares out the
            repeated blocks evenly.
        no_split_module_classes: names of classes in which no stage may begin.
        example_args: positional arguments of a forward, by which the model is cut.
        example_kwargs: its arguments by name.
        num_chunks: parts of a batch; by default as many as processes.
        gather_output: return the output on every process; otherwise the last one has it, and others get None.

    Raises:
        ConfigError: the model cannot be cut into as many stages as there are processes.
    """
    state, all_ranks = PartialState(), current()
    points = [] if split_points == "auto" else list(split_points)
    _refuse_split(model, points, no_split_module_classes or ())
    model.eval()
    if all_ranks.size == 1:
        return model.to(state.device)
    example = (example_args, dict(example_kwargs or {}))
    balance = StageBalance(model, all_ranks, False, lambda: False)
    cut, _ = balance.cut(lambda: find_cut(model, all_ranks.size, points, example))
    staged = StagedModel(model, cut, range(all_ranks.size), all_ranks, state.device, balance)
    # As many chunks as stages keep all of them busy, but for the first and the last rounds.
    chunks, is_last = num_chunks or all_ranks.size, all_ranks.rank == len(cut.stages) - 1

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = _joined(staged.together(_chunks((args, kwargs), chunks)))
        return found if gather_output or is_last else None

    model.forward = forward
    return model


def _refuse_split(model: nn.Module, points: Sequence[str], classes: Sequence[str]) -> None:
    inside = [
        (point, name)
        for name, module in model.named_modules()
        if type(module).__name__ in classes
        for point in points
        if point.startswith(f"{name}.")
    ]
    for point, name in inside:
        fix = f"is inside of {name}, whose class is in no_split_module_classes: name that module"
        raise ConfigError(Problem("split_points", point, fix))


def _chunks(call: Call, count: int) -> list[Call]:
    """The arguments of each part of a batch; what does not have its rows is given to all parts."""
    rows = next((tensor.shape[0] for tensor in tensors_in(list(call)) if tensor.dim()), 1)
    count = min(count, rows)

    def has_rows(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows

    def part(index: int) -> Call:
        found: Call = map_leaves(lambda tensor: torch.tensor_split(tensor, count)[index], call, has_rows)
        return found

    return [part(index) for index in range(count)]


def _joined(results: Sequence[Any]) -> Any:
    """The results of the parts as one."""
    first = results[0]
    if len(results) == 1:
        return first
    if isinstance(first, Tensor):
        if not first.dim():
            raise ModelError(
                "the model returns a number for each chunk of the batch, as a loss: give it no labels, or set "
                "num_chunks=1"
            )
        return torch.cat(list(results))
    if isinstance(first, StageOutput):
        return StageOutput({key: _joined([result[key] for result in results]) for key in first})
    return tuple(_joined(each) for each in zip(*results, strict=True))
