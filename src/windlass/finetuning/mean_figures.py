"""Named means for the log, each a sum over a report divided by its weight: exact for any ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from windlass.core.types import State

Sums = Mapping[str, tuple[Tensor, Tensor]]


class MeanFigures:
    """Adds up figures on the device between two reports; nothing waits for the device in between.

    Its state is saved with each rank's part of a checkpoint, so that a resumed run reports the same figures.

    Args:
        names: of the means, the same on all ranks.
        device: where the sums are.
        sum_over_ranks: returns the sum of a tensor over all ranks. Collective.
        rank: of this process in the job.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        sum_over_ranks: Callable[[Tensor], Tensor],
        rank: int = 0,
    ) -> None:
        self.names = tuple(names)
        self._sum_over_ranks, self._rank, self._device = sum_over_ranks, rank, device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = {training: self._zeros() for training in (True, False)}
        self._tokens, self._in_update = self._no_tokens(), False
        self._update = self._zeros(), self._no_tokens()  # of the update that is being computed

    def _zeros(self) -> Tensor:
        """A row of sums, and one of their weights."""
        return torch.zeros(2, len(self.names), dtype=self._dtype, device=self._device)

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

    def add(self, sums: Sums, tokens: Tensor, *, training: bool) -> None:
        """Add the figures of one batch on this rank.

        Args:
            sums: a sum and its weight for each name, scalar tensors.
            tokens: inputs that are not padding; counted in training only. In training, batches count only within an
                update: the first one is also run for measurements before.
        """
        if training and not self._in_update:
            return
        rows = [
            torch.stack([sums[name][at].detach().to(self._dtype) for name in self.names]) for at in (0, 1)
        ]
        into, all_tokens = self._update if training else (self._sums[False], self._no_tokens())
        into += torch.stack(rows)
        all_tokens += tokens.detach()

    def read(self, *, training: bool) -> dict[str, float]:
        """The means over all ranks since the last call, and `num_tokens`, those of the whole run. Collective. A mean
        without weight is left out; an empty dict if no batch was added on any rank.
        """
        joined = self._sum_over_ranks(
            torch.cat([self._sums[training].flatten(), self._tokens[None].to(self._dtype)])
        )
        *values, tokens = joined.tolist()
        self._sums[training] = self._zeros()
        count = len(self.names)
        found = {
            name: total / weight
            for name, total, weight in zip(self.names, values[:count], values[count:], strict=True)
            if weight
        }
        return {**found, "num_tokens": tokens} if found else {}

    def forget(self, *, training: bool) -> None:
        """Drop what was added since the last report; the tokens of the run stay counted."""
        self._sums[training] = self._zeros()

    def state_dict(self) -> State:
        return {"sums": self._sums[True].flatten().tolist(), "tokens": int(self._tokens)}

    def load_state_dict(self, state: State) -> None:
        self._sums[True] = self._read(state)
        self._tokens = torch.tensor(state["tokens"], dtype=torch.int64, device=self._device)

    def _read(self, state: State) -> Tensor:
        return torch.tensor(state["sums"], dtype=self._dtype, device=self._device).view(2, -1)

    def adopt(self, states: list[State]) -> None:
        """Restore the sums of a run on another number of ranks: the first rank gets all of them."""
        mine = states if self._rank == 0 else []
        self._tokens = torch.tensor(sum(s["tokens"] for s in mine), dtype=torch.int64, device=self._device)
        self._sums[True] = self._zeros()
        for state in mine:
            self._sums[True] += self._read(state)
