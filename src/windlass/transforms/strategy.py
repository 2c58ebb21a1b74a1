"""How one model is spread over the ranks of a job. One file for each way; `strategies.py` is their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.module_state import extra_states, set_state, unsaved_buffers


class Strategy(Protocol):
    """What an executor asks of the way in which its model is spread.

    Every strategy averages gradients over all ranks, so whoever hands a loss to backward multiplies this rank's share
    by the number of ranks.

    Attributes:
        model: what forwards run through (a wrapper, or the module itself).
        module: the user's own module.
        sharded: parameters lie in parts on several ranks, so every forward is a collective and ranks must make the
            same number of them.
        saves_parts: checkpoints hold what each rank has (`checkpoint/sharded.py`) instead of whole tensors.
    """

    sharded: bool
    saves_parts: bool

    @property
    def model(self) -> nn.Module: ...

    @property
    def module(self) -> nn.Module: ...

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        """Around one forward and backward: gradients are reduced over ranks only in the last one of an update."""
        ...

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Global L2 norm of these gradients (the ones that lie in `.grad` after the last micro-batch): a plain scalar
        on the gradients' device, the same on every rank. No host sync.
        """
        ...

    def local(self, gradients: list[Tensor]) -> list[Tensor]:
        """The plain tensors that hold this rank's part of them, sharing their memory: what is scaled in place."""
        ...

    def agree(self, flag: Tensor) -> Tensor:
        """The largest value of `flag` (scalar, fp32, on the device) over all ranks, in place, where ranks see different
        gradients; `flag` itself where all see the same.
        """
        ...

    def check_reached(self) -> None:
        """Once per update, after its backwards.

        Raises:
            ModelError: no forward since the last call went through what reduces gradients.
        """
        ...

    def check_used(self) -> None:
        """Before gradients are applied. Collective.

        Raises:
            ModelError: gradients that wait for a parameter which the backward did not reach were not reduced, or were
                reduced with those of another one.
        """
        ...

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        """Run discarded work before the first update, so that a resumed run repeats the same bits."""
        ...

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers. Collective."""
        ...

    def own_buffers(self) -> dict[str, Tensor]:
        """The buffers that are saved for this rank beside the state dict, by name: those that are its own, and those
        that changed and are not in the state dict.
        """
        ...

    def buffers_of_first_rank(self) -> AbstractContextManager[Any]:
        """Within the body every rank holds rank 0's buffers: those that are saved. Collective."""
        ...

    def whole_state(self) -> dict[str, Any]:
        """The module's state dict with whole tensors, under the names of the bare module, and what `get_extra_state`
        returned as it is. Collective.

        On rank 0 complete (on the host where parameters are sharded); on other ranks possibly empty.
        """
        ...

    def load_whole_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of whole tensors into the module, in place. Every rank has all of `state`."""
        ...

    def gathered(self) -> AbstractContextManager[Any]:
        """Within the body the module's parameters are whole on every rank (to generate, or to look at). Collective."""
        ...

    def release(self) -> None:
        """Training is over: let go of wrappers and of the process groups that they hold; `model` is `module` then."""
        ...


def own_state(strategy: Strategy) -> dict[str, Any]:
    """What a checkpoint holds for this rank of its model, by name: its buffers and extra states."""
    return {**strategy.own_buffers(), **extra_states(strategy.module)}


def load_own_state(strategy: Strategy, saved: Mapping[str, Any], same_world: bool) -> None:
    """Put back what `own_state` returned, of this rank or, for another number of ranks, of rank 0: then only what the
    state dict leaves out.
    """
    outside = unsaved_buffers(strategy.module)
    set_state(
        strategy.module, {name: value for name, value in saved.items() if same_world or name in outside}
    )


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into the module, strictly.

    Raises:
        ModelError: names are missing or unexpected, or shapes differ.
    """
    try:
        module.load_state_dict(dict(state))
    except RuntimeError as error:
        raise ModelError(str(error)) from None


def device_of(module: nn.Module) -> torch.device:
    """Where the module's first parameter (or buffer) lies; the CPU for a module without any."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
