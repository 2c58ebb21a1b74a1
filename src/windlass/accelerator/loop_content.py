"""The content of a loop's checkpoint: everything that was prepared or registered, and the random generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.engine import LoopEngine
from windlass.accelerator.prepared import Prepared
from windlass.checkpoint.adapters import ADAPTER_WEIGHTS, Adapter, KnownAdapter, base_part
from windlass.checkpoint.content import Content
from windlass.checkpoint.files import written_by
from windlass.checkpoint.manager import Checkpoint, weights_file
from windlass.checkpoint.nodes import Disks
from windlass.checkpoint.optimizer_state import save_optimizer_state, split_optimizer_state
from windlass.checkpoint.sharded import parts_of_rank
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.core.module_state import state_of, with_copied_buffers
from windlass.core.rng import STREAM_STEP, derive_seed, load_rng_state, rng_state, seed_generators
from windlass.core.types import State
from windlass.dist.gang import Gang
from windlass.transforms.strategy import Strategy, adopt_own_state, load_own_state, own_state

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ModelContent:
    """What is saved of one model.

    Attributes:
        state: the model's state dict; of a sharded adapter, its own tensors and the buffers.
        in_parts: True if each rank writes its part.
        adapter: the adapter, if the model trains nothing else.
        fingerprint: of the adapter's base weights, on writer ranks.
    """

    state: dict[str, Any]
    in_parts: bool
    adapter: Adapter | None = None
    fingerprint: Mapping[str, list[Any]] = field(default_factory=dict)


class LoopContent:
    """Gathers the content of a loop's checkpoints. All methods are collective."""

    def __init__(
        self, gang: Gang, device: torch.device, accumulation: AccumulationState, prepared: Prepared,
        engine: LoopEngine,
    ) -> None:  # fmt: skip
        self._gang, self._device, self._accumulation, self._prepared = gang, device, accumulation, prepared
        self._engine = engine
        self._adapters: dict[Strategy, KnownAdapter] = {}

    def models(self, disks: Disks, hooked: bool) -> list[ModelContent]:
        """The content of each model; of whole models if the script has save hooks (`hooked`)."""
        self._prepared.check_restorable()
        found = self._prepared.strategies
        if disks.nodes > 1 and any(s.sharded and not s.saves_parts for s in found):
            fix = (
                f"the folder lies on {disks.nodes} disks, and a checkpoint of whole tensors would be written to the "
                "first one only: use SHARDED_STATE_DICT, or a folder that all machines share"
            )
            raise ConfigError(Problem("state_dict_type", "FULL_STATE_DICT", fix))
        return [self._model(strategy, disks, hooked) for strategy in found]

    def _model(self, strategy: Strategy, disks: Disks, hooked: bool) -> ModelContent:
        known = self._adapters.setdefault(strategy, KnownAdapter(strategy.module))
        if not hooked and (adapter := known.find()) is not None:
            in_parts = strategy.sharded or strategy.saves_parts
            state = adapter.gathered() if in_parts else state_of(strategy.module)
            is_writer = self._gang.rank == disks.writer_rank
            fingerprint = known.fingerprint() if is_writer or strategy.sharded else {}
            return ModelContent(state, False, adapter, fingerprint)
        if disks.nodes > 1:
            # Buffers (running statistics) differ between ranks, and each disk has a copy of them.
            with strategy.buffers_of_first_rank():
                return ModelContent(with_copied_buffers(strategy.module), strategy.saves_parts)
        state = state_of(strategy.module) if strategy.saves_parts else strategy.whole_state()
        return ModelContent(state, strategy.saves_parts)

    def states(self, disks: Disks) -> Content:
        """Everything but the models; states of all ranks on writer ranks only."""
        prepared, parts = self._prepared, {}
        loop = {"step": self._accumulation.step, **self._engine.state_dict(), **census(prepared)}
        shared: dict[str, State] = {"loop": loop}
        for index, optimizer in enumerate(prepared.optimizers):
            name, owner = f"optimizer_{index}", prepared.owner_of(optimizer)
            executor = prepared.executor_of(optimizer)
            if executor.strategy.saves_parts:
                shared[name], parts[name] = split_optimizer_state(executor.optimizer, owner)
            else:
                shared[name] = save_optimizer_state(optimizer.optimizer, owner)
        shared |= {name: part.state_dict() for name, part in prepared.parts.items()}
        return Content(
            shared=shared if self._gang.rank == disks.writer_rank else {},
            per_rank={
                "rng": rng_state(self._device),
                "loaders": {"states": [loader.state_dict() for loader in prepared.loaders]},
                "buffers": {str(i): own_state(strategy) for i, strategy in enumerate(prepared.strategies)},
            },
            parts=[parts_of_rank(*item, self._gang.world, disks.members) for item in parts.items()],
        )

    def whole(self, states: Content, models: list[ModelContent], disks: Disks) -> Content:
        """`states`, and the models that no hook has removed from the list."""
        shared, files, parts = dict(states.shared), dict(states.files), list(states.parts)
        weights: dict[str, Mapping[str, Any]] = {}
        is_writer = self._gang.rank == disks.writer_rank
        for index, model in enumerate(models):
            name = model_name(index)
            if model.in_parts:
                parts.append(parts_of_rank(name, model.state, self._gang.world, disks.members))
            elif model.adapter is not None and is_writer:
                weights[weights_file(name, ADAPTER_WEIGHTS)] = model.adapter.weights(model.state)
                shared[base_part(name)] = model.adapter.base_state(model.fingerprint, model.state)
                config = written_by(model.adapter.save_config)
                files |= {weights_file(name, file): data for file, data in config.items()}
            elif is_writer:
                weights[weights_file(name)] = model.state
        return replace(states, shared=shared, weights=weights, files=files, parts=parts)


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


def load_models(checkpoint: Checkpoint, prepared: Prepared, models: list[nn.Module]) -> None:
    """Load the weights of the models that no hook has removed from the list."""
    for index, model in enumerate(models):
        strategy = prepared.strategy_of(model)
        checkpoint.load_weights(model if strategy is None else strategy.module, model_name(index))


def load_shared(checkpoint: Checkpoint, prepared: Prepared) -> None:
    """Load optimizers, schedules, registered objects and the loss scale."""
    for index, optimizer in enumerate(prepared.optimizers):
        own = prepared.executor_of(optimizer).optimizer
        checkpoint.load_optimizer(own, prepared.owner_of(optimizer), f"optimizer_{index}")
    for name, part in prepared.parts.items():
        part.load_state_dict(checkpoint.shared(name))


def load_rank(checkpoint: Checkpoint, prepared: Prepared, gang: Gang, device: torch.device) -> None:
    """Load positions in the data, this rank's own buffers, and the random generators."""
    same_world = checkpoint.world_size == gang.size
    source = gang.rank if same_world else 0
    states: list[Any] = checkpoint.per_rank("loaders", source)["states"]
    if len(states) != len(prepared.loaders):
        raise CheckpointError(
            f"{checkpoint.folder} has the positions of {len(states)} loaders, and {len(prepared.loaders)} are prepared"
        )
    for loader, state in zip(prepared.loaders, states, strict=True):
        loader.load_state_dict(state)
    load_rng_state(checkpoint.per_rank("rng", source), device)
    if not same_world:
        _log.warning(
            "%s was saved by %d process(es), and this loop has %d: the order of samples continues unchanged, but "
            "random numbers of forwards differ", checkpoint.folder, checkpoint.world_size, gang.size
        )  # fmt: skip
        seed_generators(derive_seed(STREAM_STEP, torch.initial_seed(), gang.rank))
    ranks = [gang.rank] if same_world else range(checkpoint.world_size)
    saved: list[Mapping[str, Mapping[str, Any]]] = [checkpoint.per_rank("buffers", rank) for rank in ranks]
    for index, strategy in enumerate(prepared.strategies):
        own = [states.get(str(index), {}) for states in saved]
        if same_world:
            load_own_state(strategy, own[0])
        else:
            adopt_own_state(strategy, own)
