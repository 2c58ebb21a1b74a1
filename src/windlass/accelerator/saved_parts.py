"""What checkpoints of runs and of loops of the user's own are made of: named states, models and optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.engine import LoopEngine
from windlass.accelerator.prepared import Prepared
from windlass.checkpoint.adapters import ADAPTER_WEIGHTS, Adapter, base_part, find_adapter
from windlass.checkpoint.codec import encode
from windlass.checkpoint.content import Content
from windlass.checkpoint.files import written_by
from windlass.checkpoint.manager import Checkpoint, weights_file
from windlass.checkpoint.nodes import Disks, whole_on_one_disk
from windlass.checkpoint.optimizer_state import KeepsOwnState, save_optimizer_state, split_optimizer_state
from windlass.checkpoint.sharded import parts_of_rank
from windlass.core.errors import CheckpointError, Problem, WindlassError
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.mesh import VIEWS
from windlass.core.module_state import state_of, values_of, with_copied_buffers
from windlass.core.rng import STREAM_STEP, derive_seed, load_rng_state, rng_state, seed_generators
from windlass.core.tensors import address
from windlass.core.types import State, Stateful
from windlass.data.prepared_loader import PreparedLoader
from windlass.dist.ending import exchanging
from windlass.dist.gang import Gang
from windlass.dist.sharded import is_sharded, local
from windlass.transforms.strategy import Strategy

_TOGETHER = "together"  # in the manifest

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
            load_in_place(self.owner, checkpoint.shared(name))


def load_in_place(owner: Stateful, state: State) -> None:
    """Load a state. An optimizer keeps its groups, the list and the dicts, which it may share with one that contains
    it: PyTorch replaces them, and a schedule would no longer reach both.
    """
    # Its own list alone: one that shows the groups of its parts with a property has none to keep.
    own = vars(owner) if isinstance(owner, torch.optim.Optimizer) else {}
    groups = own.get("param_groups", [])
    owner.load_state_dict(state)
    loaded = own.get("param_groups", [])
    if len(loaded) == len(groups) > 0:
        own["param_groups"] = groups
        for group, values in zip(groups, loaded, strict=True):
            group.update(values)


@dataclass(frozen=True, slots=True)
class RankPart(SavedPart):
    """An entry of which each rank has its own. `adopt` restores it from the states of all ranks if those of this run
    are others, or if `fits` says that this rank's state is of another shape; None: it is not restored.
    """

    adopt: Callable[[list[State]], None] | None = None
    fits: Callable[[State], bool] | None = None

    def load(self, checkpoint: Checkpoint, all_ranks: Gang) -> None:
        if self.optional and not checkpoint.has_of_rank(self.name, 0):
            return
        with reading(checkpoint, "rank-*"):
            own = (
                checkpoint.per_rank(self.name, all_ranks.rank) if same_ranks(checkpoint, all_ranks) else None
            )
            if own is not None and (self.fits is None or self.fits(own)):
                load_in_place(self.owner, own)
            elif self.adopt is not None:
                self.adopt([checkpoint.per_rank(self.name, rank) for rank in range(checkpoint.world_size)])


def described_ranks(all_ranks: Gang) -> dict[str, Any]:
    """Which ranks of a job compute the same samples together, for the manifest of a checkpoint."""
    return {_TOGETHER: {axis: all_ranks.mesh.along(axis) for axis in VIEWS["model"]}}


def same_ranks(checkpoint: Checkpoint, all_ranks: Gang) -> bool:
    """Return True if the ranks that saved a checkpoint had the samples, and the work on them, that those of this run
    have; checkpoints of earlier versions tell only their number.
    """
    now = described_ranks(all_ranks)
    return (
        checkpoint.world_size == all_ranks.size
        and checkpoint.meta.get(_TOGETHER, now[_TOGETHER]) == now[_TOGETHER]
    )


def states_of(parts: Sequence[SavedPart]) -> tuple[dict[str, State], dict[str, State]]:
    """The states that are the same on all ranks, and those of this rank, by name."""
    states = {part.name: part.owner.state_dict() for part in parts}
    of_rank = {part.name for part in parts if isinstance(part, RankPart)}
    shared = {name: state for name, state in states.items() if name not in of_rank}
    return shared, {name: states[name] for name in states if name in of_rank}


def check_savable(name: str, shown: object, owner: Stateful) -> None:
    """Check that the state of a script's object can be written. Raises CheckpointError if it has no state, or one that
    is not data, or one that would be divided among ranks.

    Args:
        name, shown: of the object in errors; `owner` may be a wrapper of it.
    """
    if isinstance(owner, torch.optim.Optimizer) and _updates_shards(owner):
        fix = (
            "its state is divided among ranks as the weights are, and so is saved for the run's own optimizer alone: "
            "do not register it, and it begins empty in a resumed run; or train without fsdp"
        )
        raise CheckpointError(str(Problem(name, type(shown).__name__, fix)))
    try:
        encode(owner.state_dict())
    except (AttributeError, CheckpointError) as error:
        fix = (
            f"its state cannot be saved with the run: {error}. Let its `state_dict` return data, and its "
            "`load_state_dict` restore it; or set save_strategy='no'"
        )
        raise CheckpointError(str(Problem(name, type(shown).__name__, fix))) from None


def _updates_shards(optimizer: torch.optim.Optimizer) -> bool:
    return any(is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"])


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
            with exchanging():
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
        with exchanging():
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
    optimizer: torch.optim.Optimizer, model: nn.Module, in_parts: bool, registered: Sequence[object]
) -> tuple[State, Mapping[str, Tensor]]:
    """The state of an optimizer for the main process to write, and the tensors of which every rank writes its part
    (none unless `in_parts`). Collective. Warns of another optimizer in it that is not `registered`.
    """
    held = {} if isinstance(optimizer, KeepsOwnState) else vars(optimizer)
    for name, inner in held.items():
        own = isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state
        if own and any(inner.state.values()) and not any(owner is inner for owner in registered):
            fix = f"accelerator.register_for_checkpointing(optimizer.{name}) adds it, for resumed runs"
            if _updates_shards(inner):
                fix = "it begins empty in a resumed run"
            warn_once(
                _log,
                f"{type(optimizer).__name__}.{name} is an optimizer with a state of its own, which checkpoints lack: "
                + fix,
            )
    return (
        split_optimizer_state(optimizer, model) if in_parts else (save_optimizer_state(optimizer, model), {})
    )


_log = get_job_logger(__name__)


class LoopContent:
    """What a loop's checkpoint holds: gathered for a save, and put back. All methods are collective."""

    def __init__(
        self,
        all_ranks: Gang,
        device: torch.device,
        accumulation: AccumulationState,
        prepared: Prepared,
        engine: LoopEngine,
    ) -> None:
        self._all_ranks, self._device = all_ranks, device
        self._accumulation, self._prepared = accumulation, prepared
        self._engine = engine
        self._models: dict[Strategy, SavedModel] = {}

    def models(self, disks: Disks, hooked: bool) -> list[ModelState]:
        """The content of each model; of whole models if the script has save hooks (`hooked`)."""
        found = self._prepared.strategies
        if disks.nodes > 1 and any(s.sharded and not s.saves_parts for s in found):
            raise whole_on_one_disk(disks, "state_dict_type", "the folder")
        return [self._model(strategy, disks, hooked) for strategy in found]

    def _model(self, strategy: Strategy, disks: Disks, hooked: bool) -> ModelState:
        saved = self._models.setdefault(strategy, SavedModel(strategy.module, strategy))
        if not hooked:
            return saved.content(disks, self._all_ranks.rank == disks.writer_rank)
        if strategy.saves_parts or disks.nodes > 1:
            return ModelState(saved.of_first_rank(disks.nodes), in_parts=strategy.saves_parts)
        return ModelState(strategy.whole_state())

    def forget(self) -> None:
        """Release the models."""
        self._models = {}

    def states(self, disks: Disks) -> Content:
        """Everything but the models; states of all ranks on writer ranks only."""
        prepared, shared = self._prepared, dict[str, State]()
        spread: dict[str, Mapping[str, Any]] = {}
        for index, optimizer in enumerate(prepared.optimizers):
            name, executor = f"optimizer_{index}", prepared.executors.executor_of(optimizer)
            in_parts = executor.strategy.saves_parts
            shared[name], parts = saved_optimizer(
                executor.optimizer, prepared.owner_of(optimizer), in_parts, prepared.custom
            )
            spread |= {name: parts} if in_parts else {}
        # Last: nothing here is collective, so a part that fails to return its state on one rank leaves none waiting.
        of_all, of_rank = states_of(self._parts())
        shared |= of_all
        return Content(
            shared=shared if self._all_ranks.rank == disks.writer_rank else {},
            per_rank=of_rank,
            parts=[parts_of_rank(*item, self._all_ranks, disks.members) for item in spread.items()],
        )

    def _parts(self) -> list[SavedPart]:
        """The named states, in the order in which they are restored: random generators last."""
        prepared = self._prepared
        loaders, buffers = _Loaders(prepared.loaders), _OwnStates(prepared.strategies)
        of_zero = prepared.executors.engine
        engine = [] if of_zero is None else [SavedPart("engine", of_zero, optional=True)]
        return [
            *(SavedPart(name, part) for name, part in prepared.parts.items()),
            *engine,
            SavedPart("loop", _Progress(self._accumulation, self._engine, prepared)),
            RankPart("loaders", loaders, adopt=lambda states: loaders.load_state_dict(states[0])),
            RankPart("buffers", buffers, adopt=buffers.adopt),
            RankPart("rng", Generators(self._device), adopt=self._reseed),
        ]

    def _reseed(self, states: list[State]) -> None:
        # Of rank 0 on all, and then apart by rank: generators that are equal would draw the same numbers on each.
        load_rng_state(states[0], self._device)
        seed = derive_seed(STREAM_STEP, torch.initial_seed(), self._all_ranks.over("data").rank)
        seed_generators(seed, self._device)

    def whole(self, states: Content, models: list[ModelState], disks: Disks) -> Content:
        """`states`, and the models that no hook has removed from the list."""
        shared, files, parts = dict(states.shared), dict(states.files), list(states.parts)
        weights: dict[str, Mapping[str, Any]] = {}
        is_writer = self._all_ranks.rank == disks.writer_rank
        for index, model in enumerate(models):
            name = model_name(index)
            if model.in_parts:
                parts.append(parts_of_rank(name, model.state, self._all_ranks, disks.members))
            elif model.adapter is not None and is_writer:
                weights[weights_file(name, ADAPTER_WEIGHTS)] = model.adapter.weights(model.state)
                shared[base_part(name)] = model.adapter.base_state(model.fingerprint, model.state)
                config = written_by(model.adapter.save_config)
                files |= {weights_file(name, file): data for file, data in config.items()}
            elif is_writer:
                weights[weights_file(name)] = model.state
        return replace(states, shared=shared, weights=weights, files=files, parts=parts)

    def load(self, checkpoint: Checkpoint, models: list[nn.Module]) -> None:
        """Restore everything; of the models those in the list, from which hooks remove others."""
        prepared, same = self._prepared, same_ranks(checkpoint, self._all_ranks)
        saved = checkpoint.per_rank("loaders", self._all_ranks.rank if same else 0)["states"]
        if len(saved) != len(prepared.loaders):
            raise CheckpointError(
                f"{checkpoint.folder} has the positions of {len(saved)} loaders, and {len(prepared.loaders)} are "
                "prepared"
            )
        for index, model in enumerate(models):
            strategy = prepared.strategy_of(model)
            checkpoint.load_weights(model if strategy is None else strategy.module, model_name(index))
        for index, optimizer in enumerate(prepared.optimizers):
            own = prepared.executors.executor_of(optimizer).optimizer
            checkpoint.load_optimizer(own, prepared.owner_of(optimizer), f"optimizer_{index}")
        if not same:
            _log.warning(
                "%s was saved by %d process(es), and this loop has %d, or another layout of them: the order of samples "
                "continues unchanged, but random numbers of forwards differ",
                checkpoint.folder, checkpoint.world_size, self._all_ranks.size,
            )  # fmt: skip
        for part in self._parts():
            part.load(checkpoint, self._all_ranks)


class _Progress:
    """How far the loop is, what its next update is computed with, and the number of its objects."""

    def __init__(self, accumulation: AccumulationState, engine: LoopEngine, prepared: Prepared) -> None:
        self._accumulation, self._engine, self._prepared = accumulation, engine, prepared

    def state_dict(self) -> State:
        return {"step": self._accumulation.step, **self._engine.state_dict(), **census(self._prepared)}

    def load_state_dict(self, state: State) -> None:
        self._accumulation.resume(int(state["step"]))
        self._engine.load_state_dict(state)


class _Loaders:
    """The positions of loaders in their data."""

    def __init__(self, loaders: Sequence[PreparedLoader]) -> None:
        self._loaders = loaders

    def state_dict(self) -> State:
        return {"states": [loader.state_dict() for loader in self._loaders]}

    def load_state_dict(self, state: State) -> None:
        for loader, own in zip(self._loaders, state["states"], strict=True):
            loader.load_state_dict(own)


class _OwnStates:
    """What each rank has of several models, by their numbers."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self._each = {str(index): strategy.own for index, strategy in enumerate(strategies)}

    def state_dict(self) -> State:
        return {name: own.state_dict() for name, own in self._each.items()}

    def load_state_dict(self, state: State) -> None:
        for name, own in self._each.items():
            own.load_state_dict(state.get(name, {}))

    def adopt(self, states: list[State]) -> None:
        """Take rank 0's."""
        for name, own in self._each.items():
            own.adopt([state.get(name, {}) for state in states])


def census(prepared: Prepared) -> dict[str, int]:
    """The number of prepared or registered objects of each kind."""
    return {
        "models": len(prepared.strategies),
        "optimizers": len(prepared.optimizers),
        "schedules": len(prepared.schedules),
        "custom": len(prepared.custom),
        "tensors": len(prepared.loose),
    }


def model_name(index: int) -> str:
    """The name of model `index` in a checkpoint."""
    return f"model_{index}" if index else "model"


def check_fits(checkpoint: Checkpoint, prepared: Prepared) -> None:
    """Check that the checkpoint has the same number of objects of each kind as the loop."""
    if not checkpoint.has("loop"):
        raise CheckpointError(f"{checkpoint.folder} was not written by Accelerator.save_state")
    saved, now = checkpoint.shared("loop"), census(prepared)
    names = {"custom": "registered objects", "tensors": "tensors of no prepared model"}
    wrong = [
        f"{found} {names.get(kind, kind)} and {count} here"
        for kind, count in now.items()
        if (found := saved.get(kind, 0)) != count  # loops of earlier versions had no such tensors
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder} holds {', '.join(wrong)}: prepare and register the same objects, in the same order, "
            "before load_state"
        )
