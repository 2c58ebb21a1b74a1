"""How a model under ZeRO is saved, loaded and gathered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.deepspeed import for_frozen
from windlass.config.plan import ZeroPlan
from windlass.core.module_state import ElsewhereState, bare, keep_elsewhere
from windlass.dist.gang import Gang
from windlass.transforms.alone import Alone
from windlass.zero.library import ZeroEngine


class _Values(ElsewhereState):
    """The engine's fp32 values of the parameters."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine, self._places = engine, engine.places()

    @property
    def values(self) -> dict[Tensor, Tensor]:
        trained = ((p, place.parts_of(place.kept(place.buffer))) for p, place in self._places.items())
        return dict([*self._engine.frozen().items(), *trained])

    def loaded(self) -> None:
        self._engine.use_places(self._places)

    def let_go(self) -> None:
        self._engine.let_go()


class ZeroModel(Alone):
    """A model whose optimizer state (stage 1), gradients (2) and parameters (3) are divided.

    Checkpoints hold the engine's fp32 values in parts, so that any strategy and any number of ranks reads them.

    Args:
        engine: of a model that is trained; or of one that is not, whose parameters it divides.
    """

    saves_parts = True

    def __init__(self, module: nn.Module, engine: ZeroEngine, loss_ranks: Gang) -> None:
        super().__init__(module, loss_ranks)
        self._engine: ZeroEngine | None = engine
        self._loss_ranks = loss_ranks
        self._parts = engine
        self.sharded = engine.stage == 3
        self.share_buffers()
        keep_elsewhere(module, _Values(engine))

    @property
    def model(self) -> nn.Module:
        return self.module if self._engine is None else self._engine.model

    def multiply(self, gradients: list[Tensor], factor: Tensor) -> None:
        """The engine has the gradients, and multiplies all of them in its next step."""
        self._parts.multiply(float(factor))

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        """Nothing to do: sums over ranks always have the same order."""

    def whole_state(self) -> dict[str, Any]:
        """Gathered one parameter at a time, onto the host of rank 0. Empty on other ranks."""
        if not self.sharded:
            return super().whole_state()
        own = dict(bare(self.module).state_dict(keep_vars=True))
        state: dict[str, Any] = {}
        copies: dict[int, Tensor | None] = {}  # None on other ranks, which gather tied weights once, too
        for name, value in own.items():
            if isinstance(value, nn.Parameter) and id(value) not in copies:
                with self._parts.gathered([value]):
                    copies[id(value)] = (
                        value.detach().to("cpu", copy=True) if self._loss_ranks.world.is_main else None
                    )
            if self._loss_ranks.world.is_main:
                state[name] = copies.get(id(value), value)
        return state

    def generating(self) -> AbstractContextManager[Any]:
        """Nothing to do: hooks of every layer gather it. Within `gathered`, they would free what that has gathered."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        with self._parts.gathered(self.module.parameters()):
            yield

    def _release(self) -> None:
        """A model of stage 3 stays divided: the whole one may not fit into memory."""
        if self._engine is not None:
            self._engine.release()
            self._engine = None
        if not self.sharded:
            keep_elsewhere(self.module, None)


def frozen_model(
    module: nn.Module, plan: ZeroPlan, compute: str, device: torch.device, loss_ranks: Gang
) -> ZeroModel:
    """Divide the parameters of a model that is not trained among ranks. Collective.

    Args:
        plan: its configuration may have "auto".
        compute: "fp32", "bf16" or "fp16".
    """
    return ZeroModel(
        module, ZeroEngine(module, None, for_frozen(plan.config, compute), device, loss_ranks), loss_ranks
    )
