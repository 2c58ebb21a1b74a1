"""The states in a checkpoint besides weights, optimizer and history: one list for saving, resuming and rolling back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from windlass.checkpoint.codec import encode
from windlass.checkpoint.manager import Checkpoint
from windlass.core.errors import CheckpointError, Problem, WindlassError
from windlass.core.rng import load_rng_state, rng_state
from windlass.core.types import State, Stateful
from windlass.engine.loop import Loop
from windlass.transforms.strategy import Strategy, adopt_own_state, load_own_state, own_state


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One entry of a checkpoint.

    Attributes:
        name: of its file.
        owner: the object whose state it is.
        rolls_back: a rollback restores it. It does not restore the position: the data that led there is skipped.
        optional: checkpoints of earlier versions lack it.
        earlier: its name in checkpoints of earlier versions; empty if it is the same.
    """

    name: str
    owner: Stateful
    rolls_back: bool = True
    optional: bool = False
    earlier: str = ""

    def name_in(self, checkpoint: Checkpoint) -> str:
        """The name under which this checkpoint has it."""
        return self.earlier if self.earlier and checkpoint.has(self.earlier) else self.name


@dataclass(frozen=True, slots=True)
class RankPart(SavedPart):
    """An entry of which each rank has its own. `adopt` restores it from the states of all ranks if their number has
    changed; None: it is not restored.
    """

    adopt: Callable[[list[State]], None] | None = None


class SavedParts:
    """The parts of a run, in the order in which they are restored."""

    def __init__(self, rank: int, world: int, parts: Sequence[SavedPart]) -> None:
        self._rank, self._world, self._parts = rank, world, parts

    def shared(self) -> dict[str, State]:
        """The states that are the same on all ranks."""
        return {part.name: part.owner.state_dict() for part in self._parts if not isinstance(part, RankPart)}

    def of_rank(self) -> dict[str, State]:
        """The states of this rank."""
        return {part.name: part.owner.state_dict() for part in self._parts if isinstance(part, RankPart)}

    def load(self, checkpoint: Checkpoint, *, rolling_back: bool = False) -> None:
        """Restore the parts; raise CheckpointError if one is missing or holds something else."""
        for part in self._parts:
            if rolling_back and not part.rolls_back:
                continue
            if isinstance(part, RankPart):
                with reading(checkpoint, "rank-*"):
                    self._load_rank_part(checkpoint, part)
            elif not part.optional or checkpoint.has(part.name_in(checkpoint)):
                name = part.name_in(checkpoint)
                with reading(checkpoint, name):
                    part.owner.load_state_dict(checkpoint.shared(name))

    def _load_rank_part(self, checkpoint: Checkpoint, part: RankPart) -> None:
        if part.optional and not checkpoint.has_of_rank(part.name, 0):
            return
        if checkpoint.world_size == self._world:
            part.owner.load_state_dict(checkpoint.per_rank(part.name, self._rank))
        elif part.adopt is not None:
            part.adopt([checkpoint.per_rank(part.name, rank) for rank in range(checkpoint.world_size)])


def check_savable(name: str, shown: object, owner: Stateful) -> None:
    """Check that the state of a script's object can be written.

    Args:
        name, shown: of the object in errors; `owner` may be a wrapper of it.

    Raises:
        CheckpointError: it has no state, or one that is not data.
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


# --- owners of states that belong to no other object -----------------------------------------------------------------


class Generators:
    """The random generators of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> State:
        return rng_state(self._device)

    def load_state_dict(self, state: State) -> None:
        load_rng_state(state, self._device)


class Buffers:
    """Buffers of the model that differ between ranks."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def state_dict(self) -> State:
        return own_state(self._strategy)

    def load_state_dict(self, state: State) -> None:
        load_own_state(self._strategy, state)

    def adopt(self, states: list[State]) -> None:
        """Take rank 0's."""
        adopt_own_state(self._strategy, states)


class Position:
    """The position of this rank in its data; ranks with loaders of their own are at different positions."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def state_dict(self) -> State:
        return self._loop.position

    def load_state_dict(self, state: State) -> None:
        self._loop.continue_from(state)
