"""The content of a loop's checkpoint: everything that was prepared or registered, and the random generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.engine import LoopEngine
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.saved_parts import (
    Buffers,
    Generators,
    ModelState,
    RankPart,
    SavedModel,
    SavedPart,
    saved_optimizer,
    states_of,
)
from windlass.checkpoint.adapters import ADAPTER_WEIGHTS, base_part
from windlass.checkpoint.content import Content
from windlass.checkpoint.files import written_by
from windlass.checkpoint.manager import Checkpoint, weights_file
from windlass.checkpoint.nodes import Disks, whole_on_one_disk
from windlass.checkpoint.sharded import parts_of_rank
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger
from windlass.core.rng import STREAM_STEP, derive_seed, load_rng_state, seed_generators
from windlass.core.types import State
from windlass.data.prepared_loader import PreparedLoader
from windlass.dist.gang import Gang
from windlass.transforms.strategy import Strategy

_log = get_logger(__name__)


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
        self._prepared.check_restorable()
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

    def states(self, disks: Disks) -> Content:
        """Everything but the models; states of all ranks on writer ranks only."""
        prepared = self._prepared
        shared, of_rank = states_of(self._parts())
        spread: dict[str, Mapping[str, Any]] = {}
        for index, optimizer in enumerate(prepared.optimizers):
            name, executor = f"optimizer_{index}", prepared.executor_of(optimizer)
            in_parts = executor.strategy.saves_parts
            shared[name], parts = saved_optimizer(executor.optimizer, prepared.owner_of(optimizer), in_parts)
            spread |= {name: parts} if in_parts else {}
        return Content(
            shared=shared if self._all_ranks.rank == disks.writer_rank else {},
            per_rank=of_rank,
            parts=[parts_of_rank(*item, self._all_ranks, disks.members) for item in spread.items()],
        )

    def _parts(self) -> list[SavedPart]:
        """The named states, in the order in which they are restored: random generators last."""
        prepared = self._prepared
        loaders, buffers = _Loaders(prepared.loaders), _BuffersOfAll(prepared.strategies)
        engine = [] if prepared.engine is None else [SavedPart("engine", prepared.engine, optional=True)]
        return [
            *(SavedPart(name, part) for name, part in prepared.parts.items()),
            *engine,
            SavedPart("loop", _Progress(self._accumulation, self._engine, prepared)),
            RankPart("loaders", loaders, adopt=lambda states: loaders.load_state_dict(states[0])),
            RankPart("buffers", buffers, adopt=buffers.adopt),
            RankPart("rng", Generators(self._device), adopt=self._reseed),
        ]

    def _reseed(self, states: list[State]) -> None:
        load_rng_state(states[0], self._device)
        seed_generators(derive_seed(STREAM_STEP, torch.initial_seed(), self._all_ranks.rank))

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
        prepared, same_world = self._prepared, checkpoint.world_size == self._all_ranks.size
        saved = checkpoint.per_rank("loaders", self._all_ranks.rank if same_world else 0)["states"]
        if len(saved) != len(prepared.loaders):
            raise CheckpointError(
                f"{checkpoint.folder} has the positions of {len(saved)} loaders, and {len(prepared.loaders)} are "
                "prepared"
            )
        for index, model in enumerate(models):
            strategy = prepared.strategy_of(model)
            checkpoint.load_weights(model if strategy is None else strategy.module, model_name(index))
        for index, optimizer in enumerate(prepared.optimizers):
            own = prepared.executor_of(optimizer).optimizer
            checkpoint.load_optimizer(own, prepared.owner_of(optimizer), f"optimizer_{index}")
        if not same_world:
            _log.warning(
                "%s was saved by %d process(es), and this loop has %d: the order of samples continues unchanged, but "
                "random numbers of forwards differ", checkpoint.folder, checkpoint.world_size, self._all_ranks.size
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
        self._accumulation.step = int(state["step"])
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


class _BuffersOfAll:
    """Buffers of several models that differ between ranks."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self._each = {str(index): Buffers(strategy) for index, strategy in enumerate(strategies)}

    def state_dict(self) -> State:
        return {name: buffers.state_dict() for name, buffers in self._each.items()}

    def load_state_dict(self, state: State) -> None:
        for name, buffers in self._each.items():
            buffers.load_state_dict(state.get(name, {}))

    def adopt(self, states: list[State]) -> None:
        """Take rank 0's."""
        for name, buffers in self._each.items():
            buffers.adopt([state.get(name, {}) for state in states])


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
