"""Named means for the log, each a sum over a report divided by its weight: exact for any ranks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.events import TrainerState
from windlass.core.types import State

Sums = Mapping[str, tuple[Tensor, Tensor]]


class Extremes:
    """The least or the greatest values since the last report, on this rank.

    Args:
        names: each begins with "min" or "max".
        device: where the values are.
        gather: concatenates tensors of all ranks. Collective.
    """

    def __init__(
        self, names: Sequence[str], device: torch.device, gather: Callable[[Tensor], Tensor]
    ) -> None:
        self.names, self._gather = tuple(names), gather
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        # Least values are kept with the other sign, so that one maximum serves both.
        self._signs = torch.tensor(
            [-1.0 if name.startswith("min") else 1.0 for name in names], dtype=self._dtype, device=device
        )

    def empty(self) -> Tensor:
        """Values that any other replaces."""
        return torch.full_like(self._signs, -math.inf)

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        """The values of a batch; greater is more extreme for all of them."""
        if not self.names:
            return self._signs
        return torch.stack([values[name].detach().to(self._dtype) for name in self.names]) * self._signs

    def read(self, kept: Tensor) -> dict[str, float]:
        """The extremes over all ranks. Collective."""
        if not self.names:
            return {}
        whole = self._gather(kept[None]).amax(dim=0) * self._signs
        return {n: v for n, v in zip(self.names, whole.tolist(), strict=True) if math.isfinite(v)}


class MeanFigures:
    """Adds up figures on the device between two reports; nothing waits for the device in between.

    Its state is saved with each rank's part of a checkpoint, so that a resumed run reports the same figures.

    Args:
        names: of the means, the same on all ranks.
        device: where the sums are.
        sum_over_ranks: returns the sum of a tensor over all ranks. Collective.
        adopts: whether this rank, which counts, takes over the sums of a run on other ranks.
        extremes: least and greatest values, which are reported too.
        counts: False if another rank adds the same figures.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        sum_over_ranks: Callable[[Tensor], Tensor],
        adopts: bool = True,
        extremes: Extremes | None = None,
        counts: bool = True,
    ) -> None:
        self._counts = counts
        self._extremes = extremes or Extremes((), device, lambda values: values)
        self._kept = {training: self._extremes.empty() for training in (True, False)}
        self.names = tuple(names)
        self._sum_over_ranks, self._adopts, self._device = sum_over_ranks, adopts, device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = {training: self._zeros() for training in (True, False)}
        self._tokens = self._no_tokens()
        # of the update that is being computed
        self._update = self._zeros(), self._no_tokens(), self._extremes.empty()

    def _zeros(self) -> Tensor:
        """A row of sums, and one of their weights."""
        return torch.zeros(2, len(self.names), dtype=self._dtype, device=self._device)

    def _no_tokens(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._device)

    def begin_update(self) -> None:
        """Count what is added from now on; what was added before, by an attempt that failed or by a measurement, is
        dropped.
        """
        self._update = self._zeros(), self._no_tokens(), self._extremes.empty()

    def end_update(self) -> None:
        """Keep the counts of the update."""
        sums, tokens, extremes = self._update
        self._kept[True] = torch.maximum(self._kept[True], extremes)
        self._sums[True] += sums
        self._tokens += tokens

    def add(
        self, sums: Sums, tokens: Tensor, *, training: bool, extremes: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add the figures of one batch on this rank.

        Args:
            sums: a sum and its weight for each name, scalar tensors.
            extremes: a value for each name of `extremes`.
            tokens: inputs that are not padding; counted in training only. In training, batches count only within an
                update: the first one is also run for measurements before.
        """
        rows = [
            torch.stack([sums[name][at].detach().to(self._dtype) for name in self.names]) for at in (0, 1)
        ]
        into, all_tokens, kept = (
            self._update if training else (self._sums[False], self._no_tokens(), self._kept[False])
        )
        into += torch.stack(rows)
        all_tokens += tokens.detach()
        torch.maximum(kept, self._extremes.of(extremes or {}), out=kept)

    def read(self, *, training: bool) -> dict[str, float]:
        """The means over all ranks since the last call, and `num_tokens`, those of the whole run. Collective. A mean
        without weight is left out; an empty dict if no batch was added on any rank.
        """
        # One collective for all of them. Float64 counts tokens exactly up to 2 ** 53.
        own = torch.cat([self._sums[training].flatten(), self._tokens[None].to(self._dtype)])
        *values, tokens = self._sum_over_ranks(own if self._counts else torch.zeros_like(own)).tolist()
        extremes = self._extremes.read(self._kept[training])
        self.forget(training=training)
        count = len(self.names)
        found = {
            name: total / weight
            for name, total, weight in zip(self.names, values[:count], values[count:], strict=True)
            if weight
        }
        return {**found, **extremes, "num_tokens": tokens} if found else {}

    def forget(self, *, training: bool) -> None:
        """Drop what was added since the last report; the tokens of the run stay counted."""
        self._sums[training], self._kept[training] = self._zeros(), self._extremes.empty()

    def state_dict(self) -> State:
        # JSON has no infinity.
        extremes = [None if math.isinf(value) else value for value in self._kept[True].tolist()]
        # Ranks that add the same figures save them once: a run on another number of ranks adds up what is saved.
        sums, tokens = (
            (self._sums[True], self._tokens) if self._counts else (self._zeros(), self._no_tokens())
        )
        return {"sums": sums.flatten().tolist(), "tokens": int(tokens), "extremes": extremes}

    def load_state_dict(self, state: State) -> None:
        self._sums[True], self._kept[True] = self._read(state), self._read_extremes(state)
        self._tokens = torch.tensor(state["tokens"], dtype=torch.int64, device=self._device)

    def _read(self, state: State) -> Tensor:
        return torch.tensor(state["sums"], dtype=self._dtype, device=self._device).view(2, -1)

    def _read_extremes(self, state: State) -> Tensor:
        values = [-math.inf if value is None else value for value in state["extremes"]]
        return torch.tensor(values, dtype=self._dtype, device=self._device)

    def adopt(self, states: list[State]) -> None:
        """Restore the sums of a run on other ranks: one rank gets all of them."""
        mine = states if self._adopts else []
        self._tokens = torch.tensor(sum(s["tokens"] for s in mine), dtype=torch.int64, device=self._device)
        self.forget(training=True)
        for state in mine:
            self._sums[True] += self._read(state)
            self._kept[True] = torch.maximum(self._kept[True], self._read_extremes(state))


class UpdateBorders(TrainerCallback):
    """Calls the figures at the borders of updates."""

    def __init__(self, figures: MeanFigures) -> None:
        self._figures = figures

    def on_step_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._figures.begin_update()

    def on_log(
        self, args: Args, state: TrainerState, control: Control, logs: Any = None, **kwargs: Any
    ) -> None:
        if logs and "micro_batch_too_large" in logs:  # the update is tried again
            self._figures.begin_update()

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._figures.end_update()
