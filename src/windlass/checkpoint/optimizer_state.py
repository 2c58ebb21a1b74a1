"""An optimizer's state by parameter *name*, so that it survives another order of parameters and groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.names import canonical_names, counted, shorten
from windlass.checkpoint.packed import is_packed_map, join_packed, split_packed
from windlass.checkpoint.sharded import Parts
from windlass.checkpoint.stage_state import is_in_stages, joined_state
from windlass.checkpoint.tensor_file import Deferred
from windlass.core.errors import CheckpointError, Problem
from windlass.core.tensors import laid_out_as
from windlass.core.trees import map_leaves
from windlass.core.types import State
from windlass.dist.sharded import (
    Absent,
    copy_whole_,
    from_part,
    is_packed,
    is_sharded,
    local,
    part,
    shard_like,
    whole_on_first,
)

_CLASS = "class"
_DECOUPLED = "decoupled_weight_decay"
# Options that schedules add to those of an optimizer.
_OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
# Options of the implementation, which do not change results: the present ones are kept.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_PART = (
    "windlass.part"  # key of a mark in the place of a tensor that ranks wrote in parts; its value is the name
)


class KeepsOwnState:
    """An optimizer whose state an engine keeps by other tensors than the parameters of the model."""

    def split_state(self, model: nn.Module) -> tuple[State, dict[str, Tensor]]:
        """As `split_optimizer_state`."""
        raise NotImplementedError

    def take_state(self, model: nn.Module, state: State) -> None:
        """As `load_optimizer_state`."""
        raise NotImplementedError


def part_mark(name: str) -> dict[str, str]:
    """What takes the place of a tensor in a state if ranks write its parts under `name`."""
    return {_PART: name}


def save_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> State:
    """The state of `optimizer` by canonical parameter names. Collective if parameters are sharded. Raises
    CheckpointError if the optimizer updates a parameter that the model does not have.

    Returns:
        `{"class": name, "shapes": {name: [..]}, "state": {name: {key: value}}, "groups": [{"names": [..], "options":
        {..}}]}`; a parameter that was never updated has no entry in `state`. Tensors are the optimizer's own, not
        copies. Sharded ones are gathered one at a time and whole on rank 0's host; `state` is empty on other ranks
        then.
    """
    sharded = any(is_sharded(parameter) for parameter in _parameters(optimizer))
    state = _state_by_name(optimizer, model, lambda name, entry: map_leaves(whole_on_first, entry))
    if sharded and torch.distributed.get_rank() != 0:
        state["state"] = {}
    return state


def _state_by_name(
    optimizer: torch.optim.Optimizer, model: nn.Module, convert: Callable[[str, dict[Any, Any]], Any]
) -> State:
    """The state; the entry of each parameter is the result of `convert(name, entry)`."""
    names = _names_of(optimizer, model)
    members = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    named = {names[id(parameter)]: parameter for parameter in _parameters(optimizer)}
    return {
        _CLASS: type(optimizer).__name__,
        "shapes": {name: list(parameter.shape) for name, parameter in named.items()},
        "state": {
            name: convert(name, map_leaves(split_packed, optimizer.state[parameter], is_packed))
            for name, parameter in named.items()
            if optimizer.state.get(parameter)
        },
        "groups": named_groups(optimizer.param_groups, members),
    }


def named_groups(groups: Sequence[dict[str, Any]], members: Sequence[list[str]]) -> list[State]:
    """The groups of an optimizer as a state has them; `members` are the names of the parameters of each."""
    return [
        {
            "names": names,
            "options": {key: value for key, value in group.items() if key not in ("params", "param_names")},
        }
        for names, group in zip(members, groups, strict=True)
    ]


def split_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[State, dict[str, Tensor]]:
    """As `save_optimizer_state`, but sharded tensors are returned by name, for every rank to write its part. Collective
    if ranks have different parameters.

    `join_parts` is the inverse.
    """
    if isinstance(optimizer, KeepsOwnState):
        return optimizer.split_state(model)
    if is_in_stages(model):
        return joined_state(_state_by_name(optimizer, model, lambda name, entry: entry), model, part_mark)
    parts: dict[str, Tensor] = {}
    return _state_by_name(optimizer, model, lambda name, entry: _apart(entry, name, parts)), parts


def _apart(value: Any, path: str, parts: dict[str, Tensor]) -> Any:
    """The value with marks in place of its sharded tensors, which are added to `parts`."""
    if is_sharded(value):
        parts[path] = value
        return part_mark(path)
    if isinstance(value, dict):
        return {key: _apart(item, f"{path}/{key}", parts) for key, item in value.items()}
    return value


def join_parts(state: State, parts: Parts) -> State:
    """The state before `split_optimizer_state`, with `Deferred` tensors for `load_optimizer_state`."""

    def deferred(mark: dict[str, str]) -> Deferred:
        name = mark[_PART]
        if name not in parts:
            raise CheckpointError(f"{parts.path} lacks {name!r}, which the optimizer's state refers to")
        return Deferred(name, parts)

    def is_mark(value: Any) -> bool:
        return isinstance(value, dict) and value.get(_PART) is not None

    return {**state, "state": map_leaves(deferred, state["state"], is_mark)}


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, state: State) -> None:
    """Load `state` into `optimizer`, in place, once everything is checked: the object, its parameters and tensors of
    equal shape keep their identity. Every rank has all of `state`, whose tensors may be `Deferred`; of the state of a
    sharded parameter it reads its part.

    Tensors are moved to the device of their parameter and keep their saved dtype, but for optimizers of torch. Options
    of a group (learning rate, betas, ...) are the saved ones, except those of the implementation (`fused`, `foreach`,
    ...). Raises CheckpointError for parameters missing or unexpected, shapes or groups that differ; they are named; and
    for the state of another kind of optimizer.
    """
    if isinstance(optimizer, KeepsOwnState):
        optimizer.take_state(model, state)
        return
    names = _names_of(optimizer, model)
    by_name = {names[id(parameter)]: parameter for parameter in _parameters(optimizer)}
    check_shapes({name: parameter.shape for name, parameter in by_name.items()}, state)
    _check_state(state)
    fresh = _start_states(optimizer, names, state["state"])
    _check_spread(optimizer, fresh, by_name, state["state"])
    members = [frozenset(names[id(p)] for p in group["params"]) for group in optimizer.param_groups]
    options = match_groups(members, state)
    _check_kind(optimizer, state, options)
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        for key, value in saved.items():
            if key not in IMPLEMENTATION:
                # A rate in a tensor is filled in place, because a CUDA graph or a compiled step reads that
                # tensor.
                group[key] = _placed(value, group.get(key), None, None)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Not earlier: a state that is refused leaves the optimizer as it was.
            if parameter in fresh:
                optimizer.state[parameter] = fresh.pop(parameter)
            # A parameter of another stage has neither state nor memory here.
            if not isinstance(parameter, Absent):
                _load_parameter(optimizer, group, parameter, state["state"].get(names[id(parameter)]))


def _start_states(
    optimizer: torch.optim.Optimizer, names: dict[int, str], entries: dict[str, Any]
) -> dict[Tensor, dict[Any, Any]]:
    """Create the initial state of parameters that have a saved state but none yet, with the optimizer's `start_state`.

    It defines how state tensors are sharded, and on which device they are.
    """
    start: Callable[..., dict[Any, Any]] | None = getattr(optimizer, "start_state", None)
    return {
        parameter: start(parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if start is not None
        and not isinstance(parameter, Absent)
        and names[id(parameter)] in entries
        and not optimizer.state.get(parameter)
    }


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def check_nameable(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise CheckpointError if the optimizer updates a tensor that is not a parameter of the model."""
    if not isinstance(optimizer, KeepsOwnState):
        _names_of(optimizer, model)


def sparse_momentum(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[Problem]:
    """Yield a problem for each embedding whose momentum is a sparse tensor, as its gradients are."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []
    moved = {id(p): group["momentum"] for group in groups if group["momentum"] for p in group["params"]}
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding | nn.EmbeddingBag) and table.sparse and id(table.weight) in moved:
            fix = (
                f"SGD with momentum={moved[id(table.weight)]} keeps sparse tensors, which a checkpoint does not hold: "
                "build it with sparse=False, or set momentum to 0"
            )
            yield Problem(f"model.{name}.sparse", True, fix)


def _names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[int, str]:
    """id of each of the optimizer's parameters -> its canonical name (the first one, where it is tied)."""
    named = dict(model.named_parameters())
    short = canonical_names(named)
    names = {id(parameter): short[name] for name, parameter in named.items()}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer's parameter {position} of group {index} (shape {list(parameter.shape)}) is not one "
                    "of the model's parameters, so a checkpoint cannot hold it; make it part of the model"
                )
    return names


def check_shapes(shapes: Mapping[str, Sequence[int]], state: State) -> None:
    """Check that a state is of parameters with these names and shapes. Raises CheckpointError if it is not; names are
    missing or unexpected, or shapes differ.
    """
    try:
        saved = {name: list(shape) for name, shape in state["shapes"].items()}
    except (KeyError, AttributeError, TypeError):
        raise CheckpointError(
            "the optimizer state is not one that Windlass saved (no map of shapes)"
        ) from None
    wrong = [
        f"{name} is {saved[name]} in the checkpoint and {list(shape)} in the model"
        for name, shape in shapes.items()
        if name in saved and saved[name] != list(shape)
    ]
    problems = counted(
        ((name for name in shapes if name not in saved), "parameters have none in the checkpoint"),
        ((name for name in saved if name not in shapes), "saved ones are not trained here"),
        (wrong, "have another shape"),
    )
    if problems:
        raise CheckpointError(f"the optimizer state does not fit this model: {problems}")


def _check_state(state: State) -> None:
    entries, shapes = state.get("state"), state["shapes"]
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise CheckpointError("the optimizer state is malformed: `state` is not a map of maps")
    stray = [name for name in entries if name not in shapes]
    if stray:
        raise CheckpointError(f"the optimizer state is malformed: no shape is given for {shorten(stray)}")


def match_groups(groups: Sequence[frozenset[str]], state: State) -> list[dict[str, Any]]:
    """The saved options for each of the optimizer's groups, which are given by the names of their parameters. Raises
    CheckpointError if the saved groups hold other parameters.
    """
    try:
        saved: dict[frozenset[str], list[dict[str, Any]]] = {}
        for group in state["groups"]:
            saved.setdefault(frozenset(group["names"]), []).append(dict(group["options"]))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            "the optimizer state is malformed: a group lacks its names or options"
        ) from None
    # Earlier versions had one group for all parameters of a model that is trained without weight decay.
    only = next(iter(saved)) if len(saved) == 1 else None
    options = []
    for index, members in enumerate(groups):
        known = members if members in saved else only
        if known is None or not members <= known:
            moved = sorted(members - max(saved, key=lambda other: len(members & other), default=frozenset()))
            raise CheckpointError(
                f"group {index} of the optimizer holds other parameters than any group in the checkpoint "
                f"({shorten(moved) or 'some left it'}); build the groups as they were when it was saved"
            )
        found = saved[known]
        # Only groups without parameters can be equal: they are matched in their order.
        options.append(found.pop(0) if len(found) > 1 else found[0])
    return options


def _check_kind(optimizer: torch.optim.Optimizer, state: State, options: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the state of another class with other options, which keeps other tensors or uses them otherwise."""
    saved, live = state.get(_CLASS), type(optimizer).__name__
    if saved in (None, live):
        return
    present = {key for group in optimizer.param_groups for key in group} - {"params", "param_names"}
    differing = ({key for group in options for key in group} ^ present) - IMPLEMENTATION - _OF_SCHEDULES
    # The only option that tells an Adam from an AdamW.
    if any(
        g.get(_DECOUPLED) != o.get(_DECOUPLED) for g, o in zip(optimizer.param_groups, options, strict=True)
    ):
        differing.add(_DECOUPLED)
    if differing:
        raise CheckpointError(
            f"optim: this run's optimizer is {live}, and the checkpoint's is {saved}, with other options "
            f"({shorten(sorted(differing))}): set optim to the one that the checkpoint was saved with, or let the "
            f"script pass such an optimizer, or start a new run from the checkpoint's weights"
        )


def _load_parameter(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, saved: dict[str, Any] | None
) -> None:
    if saved is None:
        optimizer.state.pop(parameter, None)  # never updated when it was saved: it starts as it did then
        return
    live = optimizer.state[parameter]
    like = None if _has_whole_state(optimizer, group) else parameter
    values = {
        key: _placed(value, live.get(key), _device_for(group, parameter, key, value), like)
        for key, value in saved.items()
    }
    live.clear()
    live.update({key: _as_computed_with(optimizer, parameter, value) for key, value in values.items()})


def _as_computed_with(optimizer: torch.optim.Optimizer, parameter: Tensor, value: Any) -> Any:
    """A tensor in the dtype of the parameter, as `torch.optim` loads its own: its kernels take no other one beside it.
    Counters stay, and what other optimizers keep in another dtype on purpose, a script's subclass of one of torch too.
    """
    kinds = {kind.__module__ for kind in type(optimizer).__mro__} - {torch.optim.Optimizer.__module__}
    if not type(optimizer).__module__.startswith(("torch.optim.", "windlass.")):
        return value
    if not any(kind.startswith("torch.optim.") for kind in kinds):
        return value
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(parameter.dtype) if value.dim() and value.shape == parameter.shape else value


def _device_for(group: dict[str, Any], parameter: Tensor, key: str, value: Any) -> torch.device | None:
    """`step` counters stay on the host (None) unless the kernel reads them on the device: torch's own rule."""
    is_counter = key == "step" and isinstance(value, Tensor | Deferred) and value.ndim == 0
    if is_counter and not (group.get("fused") or group.get("capturable")):
        return None
    return parameter.device


def _placed(value: Any, live: Any, device: torch.device | None, parameter: Tensor | None) -> Any:
    """`value` in the live tensor if that has its shape and dtype, else on `device` (None: unchanged), and sharded as
    `parameter` is.
    """
    if isinstance(value, Deferred):
        like = live if is_sharded(live) and live.shape == value.shape else parameter
        if is_sharded(like) and like.shape == value.shape:
            return _placed_part(value, live, like)
        value = value.read()
    if isinstance(value, Tensor):
        if isinstance(live, Tensor) and live.shape == value.shape and live.dtype == value.dtype:
            copy_whole_(live, value)
            return live
        if parameter is not None and _is_spread(value, parameter):
            return shard_like(value, parameter)
        # A copy: the next update would change `state`, which is the caller's.
        value = value.clone() if device is None else value.to(device, copy=True)
        return value if parameter is None or value.shape != parameter.shape else laid_out_as(value, parameter)
    if is_packed_map(value):
        assert parameter is not None, "options of groups are not tensors"
        return join_packed(value, parameter, lambda tensor: tensor.to(local(parameter).device, copy=True))
    if isinstance(value, dict):
        known = live if isinstance(live, dict) else {}
        return {key: _placed(item, known.get(key), device, parameter) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(item, None, device, parameter) for item in value)
    return value


def _placed_part(value: Deferred, live: Any, like: Tensor) -> Tensor:
    mine = value.read(part(like))
    if live is not like or live.dtype != value.dtype:
        return from_part(mine.to(local(like).device), like)
    with torch.no_grad():
        local(live).copy_(mine)
    return live


def _is_spread(value: Tensor | Deferred, parameter: Tensor) -> bool:
    """Return True if the optimizer shards this tensor as its parameter. Counters stay whole."""
    return is_sharded(parameter) and (value.numel() > 1 or value.shape == parameter.shape)


def _has_whole_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return True if every rank has all of the state of a group's parameters, as the optimizer says."""
    declared: Callable[[dict[str, Any]], bool] | None = getattr(optimizer, "has_whole_state", None)
    return declared is not None and declared(group)


def _check_spread(
    optimizer: torch.optim.Optimizer,
    fresh: dict[Tensor, dict[Any, Any]],
    by_name: dict[str, Tensor],
    entries: dict[str, Any],
) -> None:
    """Refuse tensors of another shape than their sharded parameter: only the optimizer knows how to shard them."""
    groups = [group for group in optimizer.param_groups if _has_whole_state(optimizer, group)]
    kept_whole = {id(parameter) for group in groups for parameter in group["params"]}
    for name, parameter in by_name.items():
        if id(parameter) in kept_whole:
            continue
        live = optimizer.state.get(parameter) or fresh.get(parameter, {})
        for key, value in entries.get(name, {}).items():
            if not isinstance(value, Tensor | Deferred) or not _is_spread(value, parameter):
                continue
            if value.shape not in (parameter.shape, getattr(live.get(key), "shape", None)):
                raise CheckpointError(
                    f"the optimizer keeps {key!r} of shape {list(value.shape)} for {name!r} of shape "
                    f"{list(parameter.shape)}: how that is spread over ranks is not known, so it cannot be loaded into "
                    "a sharded model; use an optimizer whose state has its parameters' shapes, such as adamw_torch"
                )
