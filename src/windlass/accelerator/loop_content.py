"""What a checkpoint of a loop holds: everything that was prepared or registered, and the generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.restoring import census, model_name
from windlass.checkpoint.adapters import ADAPTER_WEIGHTS, Adapter, KnownAdapter, base_part
from windlass.checkpoint.content import Content
from windlass.checkpoint.files import written_by
from windlass.checkpoint.manager import weights_file
from windlass.checkpoint.nodes import Disks
from windlass.checkpoint.optimizer_state import save_optimizer_state, split_optimizer_state
from windlass.checkpoint.sharded import parts_of_rank
from windlass.core.errors import ConfigError, Problem
from windlass.core.module_state import state_of, with_copied_buffers
from windlass.core.rng import rng_state
from windlass.core.types import State
from windlass.dist.gang import Gang
from windlass.transforms.strategy import Strategy, own_state


@dataclass(frozen=True, slots=True, eq=False)
class ModelContent:
    """What is saved of one model.

    Attributes:
        state: the model's state dict; of an adapter that is sharded, what belongs to it and the buffers.
        in_parts: each rank writes its part of it.
        adapter: all that the model trains; None where it trains other weights.
        fingerprint: of the weights that it is trained on, on writer ranks.
    """

    state: dict[str, Any]
    in_parts: bool
    adapter: Adapter | None = None
    fingerprint: Mapping[str, list[Any]] = field(default_factory=dict)


class LoopContent:
    """Gathers the content of a loop's checkpoints. Every rank calls its methods alike."""

    def __init__(
        self, gang: Gang, device: torch.device, accumulation: AccumulationState, prepared: Prepared
    ) -> None:
        self._gang, self._device, self._accumulation, self._prepared = gang, device, accumulation, prepared
        self._adapters: dict[Strategy, KnownAdapter] = {}

    def models(self, disks: Disks, hooked: bool) -> list[ModelContent]:
        """What is saved of each model.

        Args:
            hooked: the script has hooks that may save models themselves: they get whole ones.

        Raises:
            CheckpointError: a model would not come back from what it saves. ConfigError: whole tensors of a sharded
                model would lie on one of several disks.
        """
        self._prepared.check_restorable()
        found = self._prepared.strategies
        if disks.nodes > 1 and any(s.sharded and not s.saves_parts for s in found):
            fix = (
                f"the folder lies on {disks.nodes} disks, and a checkpoint of whole tensors would lie on the first "
                "alone: use SHARDED_STATE_DICT, or a folder that all machines share"
            )
            raise ConfigError(Problem("state_dict_type", "FULL_STATE_DICT", fix))
        return [self._model(strategy, disks, hooked) for strategy in found]

    def _model(self, strategy: Strategy, disks: Disks, hooked: bool) -> ModelContent:
        known = self._adapters.setdefault(strategy, KnownAdapter(strategy.module))
        if not hooked and (adapter := known.find()) is not None:
            state = adapter.gathered() if strategy.sharded else state_of(strategy.module)
            is_writer = self._gang.rank == disks.writer_rank
            fingerprint = known.fingerprint() if is_writer or strategy.sharded else {}
            return ModelContent(state, False, adapter, fingerprint)
        if disks.nodes > 1:
            # Buffers (running statistics) differ between ranks, and each disk gets a copy.
            with strategy.buffers_of_first_rank():
                return ModelContent(with_copied_buffers(strategy.module), strategy.saves_parts)
        state = state_of(strategy.module) if strategy.saves_parts else strategy.whole_state()
        return ModelContent(state, strategy.saves_parts)

    def states(self, disks: Disks) -> Content:
        """Everything but the models; states of all ranks on writer ranks alone."""
        prepared, parts = self._prepared, {}
        shared: dict[str, State] = {"loop": {"step": self._accumulation.step, **census(prepared)}}
        for index, optimizer in enumerate(prepared.optimizers):
            name, owner = f"optimizer_{index}", prepared.owner_of(optimizer)
            if prepared.executor_of(optimizer).strategy.saves_parts:
                shared[name], parts[name] = split_optimizer_state(optimizer.optimizer, owner)
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
        """`states`, and the models that no hook has taken out."""
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
