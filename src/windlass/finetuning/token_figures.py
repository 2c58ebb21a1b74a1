"""Entropy, accuracy and tokens of a language model, from the forward passes that compute its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import TrainerCallback
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.types import State

_SUMS = ("entropy", "correct", "targets", "aux_loss", "batches")


@dataclass(frozen=True, slots=True)
class BatchSums:
    """Sums over the targets of one batch, as scalar tensors on the device and without gradient.

    Attributes:
        entropy: of the predicted distributions, in nats.
        correct: targets that have the highest probability.
        targets: their number.
        tokens: inputs that are not padding.
        aux_loss: load-balancing loss of the experts, a mean over the batch; None if there is none.
    """

    entropy: Tensor
    correct: Tensor
    targets: Tensor
    tokens: Tensor
    aux_loss: Tensor | None = None


class TokenFigures:
    """Adds up figures on the device between two reports; nothing waits for the device in between.

    Its state is saved with each rank's part of a checkpoint, so that a resumed run reports the same figures.

    Args:
        device: where the sums are.
        sum_over_ranks: returns the sum of a tensor over all ranks. Collective.
        rank: of this process in the job.
        counts: False if another rank adds the same figures.
    """

    def __init__(
        self,
        device: torch.device,
        sum_over_ranks: Callable[[Tensor], Tensor],
        rank: int = 0,
        counts: bool = True,
    ) -> None:
        self._sum_over_ranks, self._rank, self._counts = sum_over_ranks, rank, counts
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._device = device
        self._sums = {training: self._zeros() for training in (True, False)}
        self._tokens = self._no_tokens()
        self._has_aux = self._in_update = False
        self._update = self._zeros(), self._no_tokens()  # of the update that is being computed

    def _zeros(self) -> Tensor:
        return torch.zeros(len(_SUMS), dtype=self._dtype, device=self._device)

    def _no_tokens(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._device)

    def begin_update(self) -> None:
        """Count what is added from now on; what an attempt that failed had added is dropped."""
        self._in_update = True
        self._update = self._zeros(), self._no_tokens()

    def end_update(self) -> None:
        """Keep the counts of the update, and ignore training batches until the next one."""
        sums, tokens = self._update
        self._sums[True] += sums
        self._tokens += tokens
        self._in_update = False

    def add(self, batch: BatchSums, *, training: bool) -> None:
        """Add the figures of one batch on this rank; tokens are counted in training only, and only within an update:
        the first batch is also run for measurements before.
        """
        if training and not self._in_update:
            return
        aux = torch.zeros_like(batch.entropy) if batch.aux_loss is None else batch.aux_loss
        self._has_aux = self._has_aux or batch.aux_loss is not None
        values = (batch.entropy, batch.correct, batch.targets, aux, torch.ones_like(batch.entropy))
        sums, tokens = self._update if training else (self._sums[False], self._no_tokens())
        sums += torch.stack([value.detach().to(self._dtype) for value in values])
        tokens += batch.tokens.detach()

    def read(self, *, training: bool) -> dict[str, float]:
        """The figures over all ranks since the last call, and the tokens of the whole run. Collective.

        Returns:
            entropy and mean_token_accuracy (means over targets), num_tokens, and aux_loss if there is one; an empty
            dict if no batch was added on any rank.
        """
        own = torch.cat([self._sums[training], self._tokens[None].to(self._dtype)])
        joined = self._sum_over_ranks(own if self._counts else torch.zeros_like(own))
        *sums, tokens = joined.tolist()
        self._sums[training] = self._zeros()
        found = dict(zip(_SUMS, sums, strict=True))
        if not found["batches"]:
            return {}
        targets = max(found["targets"], 1.0)
        figures = {
            "entropy": found["entropy"] / targets,
            "mean_token_accuracy": found["correct"] / targets,
            "num_tokens": tokens,
        }
        if self._has_aux:
            figures["aux_loss"] = found["aux_loss"] / found["batches"]
        return figures

    def forget(self, *, training: bool) -> None:
        """Drop what was added since the last report; the tokens of the run stay counted."""
        self._sums[training] = self._zeros()

    def state_dict(self) -> State:
        if not self._counts:
            return {"sums": self._zeros().tolist(), "tokens": 0}
        return {"sums": self._sums[True].tolist(), "tokens": int(self._tokens)}

    def load_state_dict(self, state: State) -> None:
        self._sums[True] = torch.tensor(state["sums"], dtype=self._dtype, device=self._device)
        self._tokens = torch.tensor(state["tokens"], dtype=torch.int64, device=self._device)

    def adopt(self, states: list[State]) -> None:
        """Restore the sums of a run on another number of ranks: the first rank gets all of them."""
        mine = states if self._rank == 0 else []
        self._tokens = torch.tensor(sum(s["tokens"] for s in mine), dtype=torch.int64, device=self._device)
        self._sums[True] = self._zeros()
        for state in mine:
            self._sums[True] += torch.tensor(state["sums"], dtype=self._dtype, device=self._device)


class Counting(Protocol):
    """What counts within updates."""

    def begin_update(self) -> None: ...

    def end_update(self) -> None: ...


class UpdateBorders(TrainerCallback):
    """Calls the figures at the borders of updates."""

    def __init__(self, figures: Counting) -> None:
        self._figures = figures

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._figures.begin_update()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **kwargs: Any,
    ) -> None:
        if logs and "micro_batch_too_large" in logs:  # the update is tried again
            self._figures.begin_update()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._figures.end_update()
