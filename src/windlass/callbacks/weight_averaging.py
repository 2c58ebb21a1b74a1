"""Averages of weights over updates: exponential (EMA; Polyak & Juditsky, 1992), uniform (SWA; arXiv:1803.05407)."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.names import canonical_names
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.errors import CheckpointError, ConfigError, Problem, refuse
from windlass.core.events import TrainerState
from windlass.core.module_state import kept_elsewhere
from windlass.core.types import State
from windlass.dist.sharded import copy_whole_, local, whole_on_first

_LOW = (torch.float16, torch.bfloat16)


class SWACallback(TrainerCallback):
    """Keeps the uniform average of the trained weights.

    Evaluations, checkpoints, `save_model`, the best model and the model after `train()` have the average. Training
    continues from the weights that it replaced, which checkpoints hold beside it, so a resumed run ends with the same
    bits. Buffers are not averaged.

    Half-precision weights have an average in fp32. Sharded weights have a sharded one.

    Args:
        start_step: the first update after which weights count; until then there is no average, and the weights of
            training are evaluated and saved.
        every: updates between two weights that count.

    Raises:
        ConfigError: a number out of range.
    """

    def __init__(self, start_step: int = 1, every: int = 1) -> None:
        refuse(
            Problem(name, value, "must be a whole number of at least 1")
            for name, value in (("start_step", start_step), ("every", every))
            if not isinstance(value, Real) or not value >= 1 or value % 1
        )
        self.start_step, self.every = start_step, every
        self._count = 0
        self._trained: dict[str, nn.Parameter] = {}
        self._frozen: dict[str, nn.Parameter] = {}  # the others, which a callback may unfreeze
        self._average: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}  # the weights of training, while the parameters hold the average
        self._saved: State | None = None

    def weight_of_next(self) -> float:
        """The weight of the next weights in the average."""
        return 1.0 / (self._count + 1)

    # --- events -------------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: Args, state: TrainerState, control: Control, model: Any = None, **kwargs: Any
    ) -> None:
        self.begin(model)
        if self._saved is not None:
            self._restore(self._saved)
            self._saved = None

    def begin(self, model: nn.Module) -> None:
        """Average the trained weights of `model` from now on. Raises ConfigError for those of a pipeline."""
        elsewhere = kept_elsewhere(model)
        if elsewhere is not None and elsewhere.in_stages:
            fix = "averages weights, which is not built for pipelines: leave it out, or set pp_size=1"
            raise ConfigError(Problem("callbacks", type(self).__name__, fix))
        named = dict(model.named_parameters())
        short = canonical_names(named)  # of all: they do not depend on which of them are frozen
        self._trained = {short[name]: p for name, p in named.items() if p.requires_grad}
        self._frozen = {short[name]: p for name, p in named.items() if not p.requires_grad}
        self._average, self._own, self._count = {}, {}, 0

    def on_step_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        # What a callback has unfrozen had the same weights in all updates that count so far.
        unfrozen = {name: p for name, p in self._frozen.items() if p.requires_grad}
        if not unfrozen:
            return
        self._trained |= unfrozen
        self._frozen = {name: p for name, p in self._frozen.items() if name not in unfrozen}
        if self._average:
            self._average |= {name: _wide(p) for name, p in unfrozen.items()}

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        since = state.global_step - self.start_step
        if since >= 0 and since % self.every == 0:
            self.take()

    def take(self) -> None:
        """Take the present weights into the average."""
        with torch.no_grad():
            if not self._average:
                self._average = {name: _wide(p) for name, p in self._trained.items()}
            else:
                # By name: a restored average is in the order of its checkpoint, which is not that of the parameters.
                for name, average in self._average.items():
                    mine = local(average)
                    mine.lerp_(local(self._trained[name]).to(mine.dtype), self.weight_of_next())
        self._count += 1

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self.release()

    def release(self) -> None:
        """Drop what belongs to a run that has ended; the model keeps what it holds."""
        self._trained, self._frozen, self._average, self._own = {}, {}, {}, {}

    # --- which weights the parameters hold; called by the executor ----------------------------------------------------

    def eval(self) -> None:
        """Put the average into the parameters, if there is one."""
        if self._average and not self._own:
            self._own = {name: p.detach().clone() for name, p in self._trained.items()}
            self._fill(self._average)

    def train(self) -> None:
        """Put the weights of training back."""
        self._fill(self._own)
        self._own = {}

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            local(self._trained[name]).copy_(local(value))

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """The average and the weights of training by parameter name, whole on the main process, without what the model
        itself holds. Collective if weights are sharded.
        """
        in_model = {name for name in self._own if self._average[name].dtype == self._own[name].dtype}
        return {
            "count": self._count,
            "average": {n: whole_on_first(t) for n, t in self._average.items() if n not in in_model},
            "trained": {n: whole_on_first(t) for n, t in self._own.items()},
        }

    def saved_bytes(self) -> int:
        """Bytes of the state in checkpoints, over all ranks, while the model holds the average."""
        trained = self._trained.values()
        own = sum(p.numel() * p.element_size() for p in trained)
        return own + sum(p.numel() * torch.float32.itemsize for p in trained if p.dtype in _LOW)

    def load_state_dict(self, state: State) -> None:
        """Restore a `state`; the model holds the weights that were saved with it."""
        if self._trained:
            self._restore(state)
        else:  # before training, when the model is not known
            self._saved = state

    def _restore(self, state: State) -> None:
        average, trained = state["average"], state.get("trained", {})
        saved = {**average, **trained}
        known = {**self._trained, **self._frozen}
        if unknown := sorted(saved.keys() - known.keys())[:3]:
            raise CheckpointError(
                f"the average of weights in the checkpoint is not one of this model, which lacks {', '.join(unknown)}"
            )
        if saved:
            # The run that saved it had other weights unfrozen than the script at its beginning, or than this run when
            # it rolls back.
            self._trained = {name: p for name, p in known.items() if name in saved}
            self._frozen = {name: p for name, p in known.items() if name not in saved}
        kept = {name: tensor for name, tensor in self._average.items() if name in average}
        self._average = {name: kept.get(name, _wide(self._trained[name])) for name in saved}
        self._own = {name: self._trained[name].detach().clone() for name in trained}
        for target, source in ((self._average, average), (self._own, trained)):
            for name, tensor in source.items():
                # None: sharded weights in a state that was copied in this process. They are unchanged.
                if tensor is not None:
                    copy_whole_(target[name], tensor)
        self._count = state["count"]


class EMACallback(SWACallback):
    """Keeps the exponential moving average of the trained weights; which weights are used when is as in `SWACallback`.

    Args:
        decay: `average = decay * average + (1 - decay) * weights`, in [0, 1). The first weights are the first average.
        start_step: as in `SWACallback`.
        every: as in `SWACallback`.
    """

    def __init__(self, decay: float = 0.999, start_step: int = 1, every: int = 1) -> None:
        super().__init__(start_step, every)
        given: object = decay
        if not isinstance(given, Real) or not 0 <= decay < 1:
            raise ConfigError(Problem("decay", decay, "must be at least 0 and below 1"))
        self.decay = decay

    def weight_of_next(self) -> float:
        return 1.0 - self.decay


def _wide(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.float() if value.dtype in _LOW else value.clone()
