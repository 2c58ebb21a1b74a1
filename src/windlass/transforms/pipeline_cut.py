"""Where a model is cut into the stages of a pipeline: found by one forward of the whole model.

A *unit* is a module that one stage computes: a child of a module that contains a border. A stage begins at a named
unit, and has all that are called from there to the next border: the embedding belongs to the first stage, the last norm
and the head to the last one. The rest of the forward (positions, masks, angles) runs on every stage, on the
same batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError, Problem
from windlass.core.trees import tensors_in
from windlass.transforms.blocks import repeated_blocks
from windlass.transforms.evaluating import evaluating, short_row

_WHOLE = "or set pp_size=1"
Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a forward."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a unit returns: one tensor, or a tuple of `length` whose first element is one."""

    length: int | None
    size: int | None  # of its last axis; None if all axes are those of the unit's first input
    dtype: torch.dtype  # of its elements

    def holding(self, tensor: Tensor) -> Any:
        """`tensor` as the unit would return it."""
        return tensor if self.length is None else (tensor, *[None] * (self.length - 1))


@dataclass(frozen=True, slots=True)
class Cut:
    """The stages of a model."""

    stages: list[list[str]]  # the names of the units of each, in the order of their calls
    # The unit with which each stage but the last ends: what it returns is all that the next stage gets
    last: list[str]
    outputs: dict[str, Output]  # what units return, by name

    def stage_of(self) -> dict[str, int]:
        """The stage of each unit, by name."""
        return {name: number for number, names in enumerate(self.stages) for name in names}


def find_cut(
    model: nn.Module,
    stages: int,
    split_points: Sequence[str],
    example: Example | None,
) -> tuple[Cut, Any]:
    """Cut `model`, which is whole, into `stages` stages. Runs one forward of it, unless it is a plain sequence.

    Args:
        example: arguments of that forward; None for a sequence.
        split_points: the names of the modules with which all stages but the first begin; by default its repeated blocks
            are shared out evenly.

    Returns:
        The cut, and what the forward returned; None of a sequence.

    Raises:
        ConfigError: the model cannot be cut so.
    """
    points = list(split_points) or _even_points(model, stages)
    modules = dict(model.named_modules())
    unknown = [name for name in points if name not in modules]
    if unknown:
        fix = f"the model has no such module: name modules as model.named_modules() does, {_WHOLE}"
        raise ConfigError(Problem("pp_split_points", unknown[0], fix))
    if len(points) != stages - 1:
        fix = f"{stages} stages begin with {stages - 1} modules besides the first of all: name as many"
        raise ConfigError(Problem("pp_split_points", points, fix))
    units = dict(_units(model, points))
    _refuse_between(model, units)
    if example is None:
        return _cut_of([_Call(name) for name in units], points, units), None
    calls, result = _traced(model, units, example)
    return _cut_of(calls, points, units), result


def example_of(model: Any) -> Example | None:
    """A small input of the model: a short row for models of text, and the attribute `dummy_inputs` of any other. None
    of a plain sequence, whose order is known.

    Raises:
        ConfigError: the model has none.
    """
    device = next(model.parameters()).device
    own = getattr(model, "dummy_inputs", None)
    if getattr(model, "main_input_name", None) == "input_ids" and hasattr(model, "config"):
        ids = short_row(model, 6, device)
        return (), {"input_ids": ids, **({"use_cache": False} if hasattr(model.config, "use_cache") else {})}
    if isinstance(own, Mapping):
        return (), {str(name): value for name, value in own.items()}
    if isinstance(own, tuple | Tensor):
        return (own if isinstance(own, tuple) else (own,)), {}
    if type(model).forward is nn.Sequential.forward:
        return None
    fix = (
        "has no example of its input, by which it is cut: set model.dummy_inputs to a dict of arguments of its "
        f"forward, or to one tensor, {_WHOLE}"
    )
    raise ConfigError(Problem("model", type(model).__name__, fix))


# --- the borders ------------------------------------------------------------------------------------------------------


def _even_points(model: nn.Module, stages: int) -> list[str]:
    """The first block of each stage but the first. Stages with a block more come first: the last has the head."""
    blocks = set(map(id, repeated_blocks(model)))
    names = [name for name, module in model.named_modules() if id(module) in blocks]
    if isinstance(model, nn.Sequential):
        names = [name for name, _ in model.named_children()]
    lists = {name.rpartition(".")[0] for name in names}
    if len(lists) != 1:
        fix = f"has {len(lists)} lists of repeated blocks, not one: name the borders in pp_split_points, {_WHOLE}"
        raise ConfigError(Problem("model", type(model).__name__, fix))
    if len(names) < stages:
        fix = f"is more than the {len(names)} layers of {type(model).__name__}: use fewer, or 1F1B"
        raise ConfigError(Problem("pp_size times pp_stages_per_process", stages, fix))
    each, more = divmod(len(names), stages)
    starts = [number * each + min(number, more) for number in range(1, stages)]
    return [names[start] for start in starts]


def _units(model: nn.Module, points: Sequence[str], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of modules that contain a border, and of lists, which are not called themselves."""
    for name, child in model.named_children():
        full = f"{path}{name}"
        around = any(point.startswith(f"{full}.") for point in points)
        if around or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _units(child, points, f"{full}.")
        else:
            yield full, child


def _refuse_between(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Refuse parameters outside of all units: which stage uses them is not known."""
    inside = {id(p) for unit in units.values() for p in unit.parameters()}
    outside = [name for name, p in model.named_parameters() if id(p) not in inside]
    if outside:
        fix = (
            f"is a parameter of a module that contains a border, so which stage uses it is not known: put it into a "
            f"module of its own, name other borders in pp_split_points, {_WHOLE}"
        )
        raise ConfigError(Problem(f"model.{outside[0]}", "a parameter", fix))
    norms = [name for name, unit in model.named_modules() if getattr(unit, "track_running_stats", False)]
    if norms:
        fix = f"keeps running statistics, which pipelines do not exchange: freeze it or use another norm, {_WHOLE}"
        raise ConfigError(Problem(f"model.{norms[0]}", "a batch norm", fix))


@dataclass(slots=True)
class _Call:
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None

    @property
    def tensor(self) -> Tensor | None:
        found = self.output[0] if isinstance(self.output, tuple) and self.output else self.output
        return found if isinstance(found, Tensor) else None

    def takes(self, tensor: Tensor | None) -> bool:
        """Return True if `tensor` is one of the arguments."""
        return tensor is not None and any(value is tensor for value in (*self.args, *self.kwargs.values()))


def _traced(model: nn.Module, units: Mapping[str, nn.Module], example: Example) -> tuple[list[_Call], Any]:
    calls: list[_Call] = []

    def begin(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_Call(name, args, kwargs))

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls[-1].output = output

    args, kwargs = example
    with contextlib.ExitStack() as stack:
        for name, unit in units.items():
            stack.enter_context(unit.register_forward_pre_hook(partial(begin, name), with_kwargs=True))
            stack.enter_context(unit.register_forward_hook(end))
        stack.enter_context(evaluating(model))
        return calls, model(*args, **kwargs)


def _cut_of(calls: list[_Call], points: Sequence[str], units: Mapping[str, nn.Module]) -> Cut:
    trained = {name for name, unit in units.items() if next(unit.parameters(), None) is not None}
    names = [call.name for call in calls]
    for name in dict.fromkeys(names):
        if names.count(name) > 1 and (name in trained or name in points):
            fix = f"is called {names.count(name)} times in a forward, and a stage computes it once: {_WHOLE[3:]}"
            raise ConfigError(Problem(f"model.{name}", type(units[name]).__name__, fix))
    missing = [name for name in points if name not in names]
    places = [names.index(name) for name in points if name in names]
    if missing or places != sorted(places):
        fix = "the forward calls its modules in another order, or not at all: name them in the order of their calls"
        raise ConfigError(Problem("pp_split_points", list(points), fix))
    traced = any(call.output is not None for call in calls)
    last = [_last_before(calls, place, trained) if traced else names[place - 1] for place in places]
    stages: list[list[str]] = [[] for _ in range(len(points) + 1)]
    for number, name in enumerate(names):
        stages[sum(place <= number for place in places)].append(name)
    # Units that the forward does not call have weights that are saved, so that some stage must have them.
    stages[0] += [name for name in units if name not in names]
    outputs = {call.name: found for call in calls if (found := _output_of(call, traced)) is not None}
    return Cut(stages, last, outputs)


def _last_before(calls: list[_Call], place: int, trained: Set[str]) -> str:
    """The unit before a border: the one whose result the next one gets, or else the last that has parameters."""
    after, earlier = calls[place], [call for call in calls[:place] if call.tensor is not None]
    names = [call.name for call in calls]
    handing = (call for call in reversed(earlier) if after.takes(call.tensor))
    learned = (call for call in reversed(earlier) if call.name in trained)
    found = next(handing, None) or next(learned, None)
    if found is not None and names.count(found.name) == 1:
        return found.name
    fix = f"no module before it returns one tensor, so a stage cannot begin there: name another module, {_WHOLE}"
    raise ConfigError(Problem("pp_split_points", after.name, fix))


def _output_of(call: _Call, traced: bool) -> Output | None:
    if not traced:
        return Output(None, None, torch.float32)
    tensor = call.tensor
    first = next(iter(tensors_in([call.args, call.kwargs])), None)
    if tensor is None or first is None:
        return None
    same = first.shape == tensor.shape and first.is_floating_point()
    length = len(call.output) if isinstance(call.output, tuple) else None
    return Output(length, None if same else tensor.shape[-1], tensor.dtype)
