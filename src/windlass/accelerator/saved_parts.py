"""What checkpoints of runs and of loops of the user's own are made of: named states, models and optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.adapters import Adapter, find_adapter
from windlass.checkpoint.codec import encode
from windlass.checkpoint.manager import Checkpoint
from windlass.checkpoint.nodes import Disks
from windlass.checkpoint.optimizer_state import save_optimizer_state, split_optimizer_state
from windlass.core.errors import CheckpointError, Problem, WindlassError
from windlass.core.module_state import state_of, values_of, with_copied_buffers
from windlass.core.rng import load_rng_state, rng_state
from windlass.core.tensors import address
from windlass.core.types import State, Stateful
from windlass.dist.gang import Gang
from windlass.dist.sharded import local
from windlass.transforms.strategy import Strategy, adopt_own_state, load_own_state, own_state

# --- named states -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One entry of a checkpoint."""

    name: str  # of its file
    owner: Stateful  # the object whose state it is
    # A rollback restores it. It does not restore the position: the data that led there is skipped.
    rolls_back: bool = True
    optional: bool = False  # checkpoints of earlier versions lack it
    earlier: str = ""  # its name in checkpoints of earlier versions; empty if it is the same

    def load(self, checkpoint: Checkpoint, all_ranks: Gang) -> None:
        """Restore the owner; raise CheckpointError if the part is missing or holds something else."""
        name = self.earlier if self.earlier and checkpoint.has(self.earlier) else self.name
        if self.optional and not checkpoint.has(name):
            return
        with reading(checkpoint, name):
            self.owner.load_state_dict(checkpoint.shared(name))


@dataclass(frozen=True, slots=True)
class RankPart(SavedPart):
    """An entry of which each rank has its own. `adopt` restores it from the states of all ranks if their number has
    changed; None: it is not restored.
    """

    adopt: Callable[[list[State]], None] | None = None

    def load(self, checkpoint: Checkpoint, all_ranks: Gang) -> None:
        if self.optional and not checkpoint.has_of_rank(self.name, 0):
            return
        with reading(checkpoint, "rank-*"):
            if checkpoint.world_size == all_ranks.size:
                self.owner.load_state_dict(checkpoint.per_rank(self.name, all_ranks.rank))
            elif self.adopt is not None:
                self.adopt([checkpoint.per_rank(self.name, rank) for rank in range(checkpoint.world_size)])


def states_of(parts: Sequence[SavedPart]) -> tuple[dict[str, State], dict[str, State]]:
    """The states that are the same on all ranks, and those of this rank, by name."""
    states = {part.name: part.owner.state_dict() for part in parts}
    of_rank = {part.name for part in parts if isinstance(part, RankPart)}
    shared = {name: state for name, state in states.items() if name not in of_rank}
    return shared, {name: states[name] for name in states if name in of_rank}


def check_savable(name: str, shown: object, owner: Stateful) -> None:
    """Check that the state of a script's object can be written. Raises CheckpointError if it has no state, or one that
    is not data.

    Args:
        name, shown: of the object in errors; `owner` may be a wrapper of it.
    """
    try:
        encode(owner.state_dict())
    except (AttributeError, CheckpointError) as error:
        fix = (
            f"its state cannot be saved with the run: {error}. Let its `state_dict` return data, and its "
            "`load_state_dict` restore it; or set save_strategy='no'"
        )
        raise CheckpointError(str(Problem(name, type(shown).__name__, fix))) from None


@contextlib.contextmanager
def reading(checkpoint: Checkpoint, part: str) -> Iterator[None]:
    """Within the body, a part is restored; an error of a part that holds something else names its file."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, WindlassError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{checkpoint.folder / part}.json does not hold what a run saves there ({what})"
        ) from error


class Generators:
    """The random generators of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> State:
        return rng_state(self._device)

    def load_state_dict(self, state: State) -> None:
        load_rng_state(state, self._device)


class Buffers:
    """Buffers of a model that differ between ranks."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def state_dict(self) -> State:
        return own_state(self._strategy)

    def load_state_dict(self, state: State) -> None:
        load_own_state(self._strategy, state)

    def adopt(self, states: list[State]) -> None:
        """Take rank 0's."""
        adopt_own_state(self._strategy, states)


# --- models and optimizers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ModelState:
    """What is saved of one model."""

    state: dict[str, Any]  # its state dict; of a sharded adapter, the adapter's own tensors and the buffers
    in_parts: bool = False  # each rank writes its part
    gathered: bool = False  # `state` has whole tensors of which ranks hold parts
    adapter: Adapter | None = None  # the adapter, if the model trains nothing else
    # Of the adapter's base weights, on writer ranks
    fingerprint: Mapping[str, list[Any]] = field(default_factory=dict)


class SavedModel:
    """A model as checkpoints hold it; only its adapter if nothing else is trained.

    The adapter and the fingerprint of its base are computed again only after they may have changed.
    """

    def __init__(self, model: nn.Module, strategy: Strategy) -> None:
        self._model, self._strategy = model, strategy
        self._trained: list[int] | None = None
        self._adapter: Adapter | None = None
        self._frozen: list[tuple[int, int, int]] | None = None
        self._fingerprint: dict[str, list[Any]] = {}

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is all this model trains; None if it trains other weights."""
        trained = [id(p) for p in self._model.parameters() if p.requires_grad]
        if self._trained != trained:
            self._trained, self._frozen = trained, None
            self._adapter = find_adapter(self._model)  # peft may look its configuration up over the network
        return self._adapter

    def _fingerprint_of_base(self, adapter: Adapter) -> dict[str, list[Any]]:
        """See `Adapter.fingerprint`. All ranks must have changed the same weights since the last call."""
        # A change in place increases the version of a weight; another weight has another address.
        values = values_of(self._model)
        held = [values[name] for name, p in self._model.named_parameters() if not p.requires_grad]
        frozen = [(id(value), address(local(value)), _version_of(value)) for value in held]
        if self._frozen != frozen:
            self._frozen, self._fingerprint = frozen, adapter.fingerprint()
        return self._fingerprint

    def content(self, disks: Disks, is_writer: bool) -> ModelState:
        """What this rank saves. Collective."""
        adapter, strategy = self.adapter, self._strategy
        if strategy.saves_parts and adapter is None:
            return ModelState(self.of_first_rank(disks.nodes), in_parts=True)
        gathered = self.gathered()
        state = self.of_first_rank(disks.nodes) if gathered is None else gathered
        fingerprint: Mapping[str, list[Any]] = {}
        if adapter is not None and (is_writer or strategy.sharded):
            fingerprint = self._fingerprint_of_base(adapter)
        return ModelState(state, gathered=gathered is not None, adapter=adapter, fingerprint=fingerprint)

    def gathered(self) -> dict[str, Any] | None:
        """Whole tensors (on the main process) if ranks hold parts of them; None if the model has them itself.
        Collective.
        """
        adapter, strategy = self.adapter, self._strategy
        if not (strategy.sharded or (strategy.saves_parts and adapter is not None)):
            return None
        return strategy.whole_state() if adapter is None else adapter.gathered()

    def of_first_rank(self, nodes: int) -> dict[str, Any]:
        """The model's state dict with rank 0's buffers (running statistics differ between ranks) on each rank that
        writes a copy, one for each of `nodes` disks. Collective if there are several.
        """
        if nodes == 1:
            return state_of(self._model)
        with self._strategy.buffers_of_first_rank():
            return with_copied_buffers(self._model)


def _version_of(value: Tensor) -> int:
    """How often a weight, or this rank's part of it, was changed in place."""
    mine: Tensor | None = getattr(value, "mine", value)
    return 0 if mine is None else mine._version


def saved_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, in_parts: bool
) -> tuple[State, Mapping[str, Tensor]]:
    """The state of an optimizer for the main process to write, and the tensors of which every rank writes its part
    (none unless `in_parts`). Collective.
    """
    return (
        split_optimizer_state(optimizer, model) if in_parts else (save_optimizer_state(optimizer, model), {})
    )
