"""The engine of a loop that the user owns: it divides losses; the prepared optimizers make the updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.accelerator.memory import clear_device_cache
from windlass.accelerator.pace import Pace
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.terms import TermsOfUpdate
from windlass.config.plan import DistPlan
from windlass.core.types import LossTerms
from windlass.dist.beacon import AFTER, beacon
from windlass.dist.gang import Gang
from windlass.transforms.strategy import Strategy


class OwnLoop:
    """Implements `LoopEngine` for a script that calls forward, backward and step itself."""

    def __init__(
        self, dist: DistPlan, pace: Pace, prepared: Prepared, gang: Gang, device: torch.device
    ) -> None:
        self._dist, self._pace, self._prepared, self._gang = dist, pace, prepared, gang
        self._terms = TermsOfUpdate(prepared, gang, device)

    @property
    def dist(self) -> DistPlan:
        return self._dist

    @property
    def strategies(self) -> Sequence[Strategy]:
        return ()

    @property
    def step_was_skipped(self) -> bool:
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    def keeps(self, item: Any, prepares: Callable[[torch.optim.Optimizer], bool]) -> bool:
        return False

    def backward(self, loss: Any, **kwargs: Any) -> None:
        beacon().call("backward")
        if isinstance(loss, LossTerms):
            self._terms.backward(loss, self._pace, kwargs)
        else:
            self._terms.plain(self._pace.sync_gradients)
            share: Any = self._prepared.scaler.scale(self._share_of(loss))
            share.backward(**kwargs)
        beacon().call(f"{AFTER}backward")

    def _share_of(self, loss: Tensor) -> Tensor:
        """This micro-batch's part of the update's loss, times the number of processes, whose mean is taken."""
        steps = self._pace.num_steps
        share = loss if steps == 1 else loss / steps
        loader = self._pace.active_dataloader
        if loader is None or loader.samples_here * self._gang.size == loader.samples_everywhere:
            return share
        if loader.is_filler:  # the mean over nothing may be NaN
            return torch.nan_to_num(share, nan=0.0, posinf=0.0, neginf=0.0) * 0.0
        return share * (loader.samples_here * self._gang.size / loader.samples_everywhere)

    def free_memory(self) -> None:
        self._prepared.let_go()
        self._pace.reset()
        clear_device_cache(garbage_collection=True)

    def check_may_save(self) -> None:
        """A loop of the user's own saves where it wants to."""
