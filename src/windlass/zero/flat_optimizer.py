"""The optimizer that DeepSpeed's engine steps, and its state by the names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.names import canonical_names, shorten
from windlass.checkpoint.optimizer_state import (
    IMPLEMENTATION,
    KeepsOwnState,
    check_shapes,
    match_groups,
    named_groups,
    part_mark,
)
from windlass.checkpoint.tensor_file import Deferred, read_run
from windlass.core.errors import CheckpointError, ConfigError, ModelError, Problem
from windlass.core.types import State
from windlass.dist.flat import FlatParts
from windlass.zero.library import Place


class ZeroOptimizer(torch.optim.Optimizer, KeepsOwnState):
    """The user's optimizer, over the flat tensors of the engine.

    Groups, state and defaults are those of `optimizer`, so schedules on either set the same learning rates. `zero_grad`
    of either discards the gradients that the engine keeps: scripts have `optimizer`, and its own would remove the flat
    tensors into which the engine copies gradients. After `release` it has the parameters again, with this rank's parts
    of their state, which another engine takes over.

    Attributes:
        skips: the next step changes nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # The base class's constructor is not called: it would create groups and a state of its own.
        self.optimizer = optimizer
        self.skips = self._released = False
        # The engine replaces the parameters of groups, may copy them, and takes none without a trained parameter.
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self._members: list[list[nn.Parameter]] = [members for _, members in self._groups]
        self._earlier: dict[Any, dict[str, Any]] = dict(optimizer.state)
        optimizer.state.clear()
        self._places: Mapping[nn.Parameter, Place] = {}
        self._discard: Callable[[], None] = _nothing
        self._all_groups = optimizer.param_groups
        trained = [group for group, members in self._groups if any(p.requires_grad for p in members)]
        self._engine_groups = self._current = optimizer.param_groups = trained
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        optimizer.add_param_group = self.add_param_group  # type: ignore[method-assign]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._current

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._current = groups  # the engine steps one group at a time
        self.optimizer.param_groups = self._all_groups if groups is self._engine_groups else groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {} if self._released else self.optimizer.state  # of which the engine may look at its own alone

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.skips:
            self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients that the engine keeps."""
        self._discard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ModelError: the engine has divided the parameters, and would not update others."""
        raise ModelError(
            "DeepSpeed has divided the parameters of this optimizer, and would never update those of a new group: put "
            "them into a group before train() or prepare(), whose learning rate is 0 until they are to be trained"
        )

    def use_engine(self, places: Mapping[nn.Parameter, Place], discard: Callable[[], None]) -> None:
        """Called once the engine has divided the parameters, with what discards its gradients."""
        self._places, self._discard = places, discard
        self._members = [[p for p in group if p in places] for _, group in self._groups]
        settings = iter(self._engine_groups)
        # Schedules know the groups of `optimizer` by their position, so that its list has all of them.
        self._all_groups = [
            next(settings) if members else group
            for (group, _), members in zip(self._groups, self._members, strict=True)
        ]
        self.param_groups = self._engine_groups
        if self._earlier:
            self._fill({parameter: ("a parameter", entry) for parameter, entry in self._earlier.items()})
        self._earlier.clear()

    def release(self) -> None:
        """Return the parameters to the optimizer, with their state, of which this rank has parts."""
        entries = {parameter: self._entry(place) for parameter, place in self._places.items()}
        self.state.clear()
        self.state.update({parameter: entry for parameter, entry in entries.items() if entry})
        for (group, members), current in zip(self._groups, self._all_groups, strict=True):
            group.update({**current, "params": members})
        self._current = self.optimizer.param_groups = [group for group, _ in self._groups]
        del self.optimizer.zero_grad, self.optimizer.add_param_group  # its class's again
        self._discard, self._released = _nothing, True

    def _entry(self, place: Place) -> dict[str, Any]:
        """The state of one parameter."""
        state = self.state.get(place.buffer) or {}
        found = {
            key: place.kept(value) if isinstance(value, Tensor) else value for key, value in state.items()
        }
        shape = place.kept(place.buffer).shape
        return {
            key: place.parts_of(value) if isinstance(value, Tensor) and value.shape == shape else value
            for key, value in found.items()
        }

    # --- its state ----------------------------------------------------------------------------------------------------

    def split_state(self, model: nn.Module) -> tuple[State, dict[str, Tensor]]:
        """As `checkpoint.optimizer_state.split_optimizer_state`."""
        names, parts = self._names(model), dict[str, Tensor]()
        entries: dict[str, Any] = {}
        for parameter, place in self._places.items():
            name = names[parameter]
            for key, value in self._entry(place).items():
                entry = entries.setdefault(name, {})
                if isinstance(value, FlatParts):
                    path = f"{name}/{key}"
                    parts[path], value = value, part_mark(path)
                entry[key] = value
        groups = named_groups(self._all_groups, [[names[p] for p in members] for members in self._members])
        shapes = {names[parameter]: list(place.shape) for parameter, place in self._places.items()}
        return {"shapes": shapes, "state": entries, "groups": groups}, parts

    def take_state(self, model: nn.Module, state: State) -> None:
        """As `checkpoint.optimizer_state.load_optimizer_state`."""
        names = self._names(model)
        check_shapes({names[parameter]: place.shape for parameter, place in self._places.items()}, state)
        members = [frozenset(names[parameter] for parameter in group) for group in self._members]
        options = match_groups(members, state)
        for group, saved in zip(self._all_groups, options, strict=True):
            group.update({key: value for key, value in saved.items() if key not in IMPLEMENTATION})
        entries = {
            parameter: (name, state["state"][name])
            for parameter, name in names.items()
            if name in state["state"]
        }
        self._fill(entries)

    def _fill(self, entries: Mapping[nn.Parameter, tuple[str, Mapping[str, Any]]]) -> None:
        """Replace the state by these entries of parameters, each with a name for errors. One buffer at a time: the
        others may be in files.
        """
        members: dict[int, list[tuple[nn.Parameter, Place]]] = {}
        for parameter, place in self._places.items():
            members.setdefault(id(place.buffer), []).append((parameter, place))
        for group in members.values():
            first = group[0][1]
            with first.filling():
                self.state.pop(first.buffer, None)
                for parameter, place in group:
                    if parameter in entries:
                        self._take_entry(entries[parameter][0], place, entries[parameter][1])

    def _take_entry(self, name: str, place: Place, entry: Mapping[str, Any]) -> None:
        live = self.state[place.buffer]
        for key, value in entry.items():
            if (
                isinstance(value, Tensor | Deferred)
                and tuple(value.shape) == tuple(place.shape)
                and key != "step"
            ):
                if key not in live:
                    live[key] = torch.zeros_like(place.buffer, dtype=value.dtype, requires_grad=False)
                live[key].narrow(0, place.offset, place.length).copy_(_run(value, place))
                continue
            value = value.read() if isinstance(value, Deferred) else value
            value = value.clone() if isinstance(value, Tensor) else value
            if key in live and not _equal(live[key], value):
                raise CheckpointError(
                    f"the optimizer's {key!r} of {name!r} is {value}, and that of other parameters {live[key]}: under "
                    "ZeRO the parameters of a group share it"
                )
            live[key] = value

    def _names(self, model: nn.Module) -> dict[nn.Parameter, str]:
        named = dict(model.named_parameters())
        short = canonical_names(named)
        names = {parameter: short[name] for name, parameter in named.items()}
        stray = [index for index, group in enumerate(self._members) if not names.keys() >= set(group)]
        if stray:
            raise CheckpointError(
                f"groups {shorten(map(str, stray))} of the optimizer have parameters that the model does not have, so "
                "a checkpoint cannot hold them; make them part of the model"
            )
        return names


def _nothing() -> None:
    """What discards gradients while there is no engine."""


def _run(value: Tensor | Deferred, place: Place) -> Tensor:
    """This rank's elements of a state of the parameter's shape."""
    if isinstance(value, FlatParts):
        if value.pieces != tuple(place.pieces):
            fix = "keep the stage, or make a new Trainer, whose optimizer has no state yet"
            raise ConfigError(Problem("deepspeed", "another division of the parameters than before", fix))
        return value.mine
    if isinstance(value, Deferred):
        return read_run(value.source, value.name, place.start, place.length)
    return value.reshape(-1)[place.start :][: place.length]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other.to(one.device))
    return bool(one == other)
