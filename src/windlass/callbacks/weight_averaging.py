"""Averages of weights over updates: exponential (EMA; Polyak & Juditsky, 1992), uniform (SWA; arXiv:1803.05407)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.names import canonical_names
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.events import TrainerCallback, TrainerControl, TrainerState
from windlass.core.types import State
from windlass.dist.sharded import copy_whole_, local, whole_on_first

_LOW = (torch.float16, torch.bfloat16)


class SWACallback(TrainerCallback):
    """Keeps the uniform average of the trained weights.

    Training uses its own weights, and checkpoints have them and the average, so a resumed run continues to the bit.
    Evaluations within the run use the average. At the end of training the average replaces the weights, so what
    is evaluated or saved after `train()` is the average. Buffers are not averaged.

    Half-precision weights have an average in fp32. Sharded weights have a sharded one.

    Args:
        start_step: the first update after which weights count; until then there is no average, and evaluations use the
            weights of training.
        every: updates between two weights that count.

    Raises:
        ConfigError: a number out of range; at the start of training, `load_best_model_at_end`.
    """

    def __init__(self, start_step: int = 1, every: int = 1) -> None:
        problems = [
            Problem(name, value, "must be a whole number of at least 1")
            for name, value in (("start_step", start_step), ("every", every))
            if value < 1
        ]
        if problems:
            raise ConfigError(problems)
        self.start_step, self.every = start_step, every
        self._count = 0
        self._trained: dict[str, nn.Parameter] = {}
        self._average: dict[str, Tensor] = {}
        self._saved: State | None = None

    def weight_of_next(self) -> float:
        """The weight of the next weights in the average."""
        return 1.0 / (self._count + 1)

    # --- events -------------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if args.load_best_model_at_end:
            fix = (
                f"{type(self).__name__} puts the average into the model at the end, and the best checkpoint has the "
                "weights of training: leave one of the two out"
            )
            raise ConfigError(Problem("load_best_model_at_end", True, fix))
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        short = canonical_names(named)
        self._trained = {short[name]: p for name, p in named.items()}
        self._average, self._count = {}, 0
        if self._saved is not None:
            self._restore(self._saved)
            self._saved = None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        since = state.global_step - self.start_step
        if since < 0 or since % self.every:
            return
        with torch.no_grad():
            if not self._average:
                self._average = {name: _wide(p) for name, p in self._trained.items()}
            else:
                for average, parameter in zip(self._average.values(), self._trained.values(), strict=True):
                    mine = local(average)
                    mine.lerp_(local(parameter).to(mine.dtype), self.weight_of_next())
        self._count += 1

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._use_average()
        self._trained, self._average = {}, {}

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which the model has the average."""
        if not self._average:
            yield
            return
        before = [local(p).detach().clone() for p in self._trained.values()]
        self._use_average()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self._trained.values(), before, strict=True):
                    local(parameter).copy_(value)

    @torch.no_grad()
    def _use_average(self) -> None:
        for name, average in self._average.items():
            local(self._trained[name]).copy_(local(average))

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """The average by parameter name, whole on the main process. Collective if weights are sharded."""
        average = {name: whole_on_first(tensor) for name, tensor in self._average.items()}
        return {"count": self._count, "average": average}

    def load_state_dict(self, state: State) -> None:
        if self._trained:
            self._restore(state)
        else:  # before training, when the model is not known
            self._saved = state

    def _restore(self, state: State) -> None:
        saved: Mapping[str, Any] = state["average"]
        if saved and saved.keys() != self._trained.keys():
            differing = sorted(saved.keys() ^ self._trained.keys())[:3]
            raise CheckpointError(
                f"the average of weights in the checkpoint is not one of this model: {', '.join(differing)} differ"
            )
        self._average = {name: _wide(self._trained[name]) for name in saved}
        for name, tensor in self._average.items():
            copy_whole_(tensor, saved[name])
        self._count = state["count"]


class EMACallback(SWACallback):
    """Keeps the exponential moving average of the trained weights; which weights are used when is as in `SWACallback`.

    Args:
        decay: `average = decay * average + (1 - decay) * weights`, in [0, 1). The first weights are the first average.
        start_step, every: as in `SWACallback`.
    """

    def __init__(self, decay: float = 0.999, start_step: int = 1, every: int = 1) -> None:
        super().__init__(start_step, every)
        if not 0 <= decay < 1:
            raise ConfigError(Problem("decay", decay, "must be at least 0 and below 1"))
        self.decay = decay

    def weight_of_next(self) -> float:
        return 1.0 - self.decay


def _wide(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.float() if value.dtype in _LOW else value.clone()
