"""Losses and gradient norms since the last report, kept on the device and read once per report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.core import host
from windlass.core.types import State

SumOverRanks = Callable[[Tensor], Tensor]
Gather = Callable[[list[str]], list[list[str]]]


class Ledger:
    """Sums of losses over updates. `read` costs one transfer and one reduction, `add` neither.

    Losses are the *shares* of a rank: their sum over ranks is the loss of the update. Sums are float64 if the device
    has it.

    Args:
        counts: False if another rank adds the same shares.
        gather: every rank's value, in rank order. Collective.

    Means are over applied updates. A skipped one (not finite, or an overflow in fp16) changed no weight, and its loss,
    often NaN, would hide all others. It is counted in `skipped`; a report of skipped updates alone has their loss.
    """

    def __init__(
        self,
        device: torch.device,
        sum_over_ranks: SumOverRanks,
        counts: bool = True,
        gather: Gather = lambda value: [value],
    ) -> None:
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self.device, self._on_host = device, device.type == "cpu"
        self._sum_over_ranks, self._gather, self._counts = sum_over_ranks, gather, counts
        self._parts: dict[str, Any] = {}
        self._updates = 0
        self._skips = 0
        # On the CPU sums are Python numbers: values are read in place, and adding tensors costs more.
        self._loss, self._skipped_loss = self._taken(0.0), self._taken(0.0)
        self._last_norm: Tensor | None = None
        self.total_loss = 0.0
        self.total_updates = 0
        self.skipped = 0
        self.shared: list[float] = []

    def add(self, loss: Tensor, norm: Tensor, parts: dict[str, Tensor], applied: bool) -> Tensor | float:
        """Add one update. `loss` and `parts` are the shares of this rank, `norm` is global. No host sync.

        Returns:
            The loss as it was added: a number on the CPU, a tensor on a device.
        """
        self._last_norm = norm
        taken: Tensor | float = host.read(loss) if self._on_host else self._taken(loss)
        if not applied:
            self._skips += 1
            self.skipped += 1
            self._skipped_loss = self._skipped_loss + taken
            return taken
        self._updates += 1
        self._loss = self._loss + taken
        for name, value in parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + self._taken(value)
        return taken

    def _taken(self, value: Tensor | float) -> Any:
        """A value in the form of the sums: a number on the CPU, a scalar tensor on a device."""
        if self._on_host:
            return host.read(value) if isinstance(value, Tensor) else value
        return torch.as_tensor(value, dtype=self._dtype, device=self.device)

    def read(self, own: Sequence[float] = ()) -> dict[str, float]:
        """Return the means since the last call (`loss`, each auxiliary part) and the last gradient norm; reset them.

        Collective. Empty if no update was added.

        Args:
            own: further numbers of this rank; `shared` has their sums over ranks afterwards.
        """
        if not self.pending:
            return {}
        names = sorted(self._parts)
        loss, count = (self._loss, self._updates) if self._updates else (self._skipped_loss, self._skips)
        shares = [loss, *(self._parts[name] for name in names)]
        norms = [] if self._last_norm is None else [self._taken(self._last_norm)]
        # One transfer for all values: each waits for the device. The norm is already the same on every rank.
        values = shares + norms
        packed = torch.tensor(values, dtype=self._dtype) if self._on_host else torch.stack(values).cpu()
        of_rank = packed[: len(shares)] if self._counts else torch.zeros_like(packed[: len(shares)])
        further = torch.tensor([float(len(names)), *own], dtype=self._dtype)
        total, of_any, *self.shared = self._sum_over_ranks(torch.cat([of_rank[:1], further])).tolist()
        sums = {"loss": total}
        if of_any:
            sums |= self._sums_of_parts(dict(zip(names, of_rank[1:].tolist(), strict=True)))
        if self._updates:
            self.total_loss += total
            self.total_updates += self._updates
        report = {name: value / count for name, value in sums.items()}
        if norms:
            report["grad_norm"] = float(packed.numpy()[-1])
        self._loss, self._skipped_loss = self._taken(0.0), self._taken(0.0)
        self._parts, self._updates, self._skips = {}, 0, 0
        return report

    def _sums_of_parts(self, own: dict[str, float]) -> dict[str, float]:
        """Sums over ranks by name: the batches of a rank may lack a part that those of another have. Collective."""
        names = sorted({name for of_rank in self._gather(list(own)) for name in of_rank})
        values = torch.tensor([own.get(name, 0.0) for name in names], dtype=self._dtype)
        return dict(zip(names, self._sum_over_ranks(values).tolist(), strict=True))

    @property
    def updates(self) -> int:
        """Applied updates since the last `read`."""
        return self._updates

    @property
    def last_norm(self) -> Tensor | None:
        """The gradient norm of the last update; None before the first one."""
        return self._last_norm

    def loss_of_interval(self) -> Tensor:
        """This rank's share of the sum of the losses since the last `read`: a scalar on the device. No host sync."""
        return torch.as_tensor(self._loss, dtype=self._dtype, device=self.device)

    @property
    def pending(self) -> bool:
        """Whether updates were added since the last `read`."""
        return self._updates + self._skips > 0

    def mean_loss(self) -> float:
        """Mean loss over every applied update that was read, since the run began (not since it was resumed)."""
        return self.total_loss / self.total_updates if self.total_updates else 0.0

    def state_dict(self) -> State:
        zero = self._taken(0.0)
        return {
            "loss": self._loss if self._counts else zero,
            "parts": dict(self._parts) if self._counts else dict.fromkeys(self._parts, zero),
            "updates": self._updates,
            "skips": self._skips,
            "skipped_loss": self._skipped_loss if self._counts else zero,
            "norm": None if self._last_norm is None else self._last_norm.clone(),
            "total_loss": self.total_loss,
            "total_updates": self.total_updates,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: State) -> None:
        self._loss, self._skipped_loss = self._taken(state["loss"]), self._taken(state["skipped_loss"])
        self._parts = {name: self._taken(value) for name, value in state["parts"].items()}
        self._updates, self._skips = state["updates"], state["skips"]
        self._last_norm = None if state["norm"] is None else state["norm"].to(self.device)
        self.total_loss, self.total_updates = state["total_loss"], state["total_updates"]
        self.skipped = state["skipped"]


class FiniteWatch:
    """Checks that the loss and the norm of each update are finite, without a host sync.

    On the CPU the values are read at once. On an accelerator they are copied to pinned memory after the work of the
    update, and read once the *next* update is queued: one step late, but the device never idles.
    """

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type not in ("cpu", "mps")
        self._recorded = device.type == "xla"
        self._pending: tuple[Any, Any, Any] | None = None

    def add(self, loss: Tensor | float, norm: Tensor, tag: Any) -> tuple[Any, float, float] | None:
        """Add one update; return `(tag, loss, norm)` of an update that was not finite, if any. `loss` is what
        `Ledger.add` returned.
        """
        if not self._asynchronous:
            # The memory of mps is shared, and cannot be pinned.
            values = float(loss), host.read(norm) if norm.is_cpu else float(norm)
            return None if math.isfinite(values[0]) and math.isfinite(values[1]) else (tag, *values)
        assert isinstance(loss, Tensor)
        earlier = self.flush()
        if self._recorded:
            self._pending = ((loss.detach(), norm.detach()), None, tag)
            return earlier
        pinned = torch.empty(2, dtype=torch.float32, pin_memory=True)
        # One may be on the host already: the norm is where the gradients are.
        for place, value in enumerate((loss, norm)):
            pinned[place].copy_(value.detach(), non_blocking=True)
        event = torch.Event(loss.device.type)
        event.record()
        self._pending = (pinned, event, tag)
        return earlier

    def flush(self) -> tuple[Any, float, float] | None:
        """Wait for the last update and check it; called before a save."""
        if self._pending is None:
            return None
        pinned, event, tag = self._pending
        self._pending = None
        if event is None:  # results of a graph that was started an update ago: no work is recorded here
            return _judge(tag, *(float(value) for value in pinned))
        event.synchronize()
        loss, norm = host.read(pinned)
        return _judge(tag, loss, norm)


def _judge(tag: Any, loss: float, norm: float) -> tuple[Any, float, float] | None:
    return None if math.isfinite(loss) and math.isfinite(norm) else (tag, loss, norm)
