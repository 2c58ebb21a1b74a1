"""Detects parameters that a backward did not reach: in the first update of replicas, or on some ranks if sharded."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from windlass.core.errors import ModelError
from windlass.dist.gang import Gang, Pending
from windlass.transforms.wrapping import listed

_SHOWN = 10


class ReachedParameters:
    """Records the parameters that the first reducing backward reaches, by hooks that are removed after its update.

    Replicas reduce gradients in buckets, and a bucket with an unused parameter is never reduced. PyTorch reports it at
    the next forward, after the optimizer used gradients that differ between ranks.

    Args:
        module: the model.
        wrapper: its replica.
    """

    def __init__(self, module: nn.Module, wrapper: DistributedDataParallel) -> None:
        left_out = wrapper.parameters_to_ignore
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad and n not in left_out}
        self._names = {id(p): name for name, p in trained.items()}
        self._wrapper = wrapper
        self._reached: set[int] = set()
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in trained.values()]  # type: ignore[no-untyped-call]

    def _note(self, parameter: Tensor) -> None:
        # The backwards of earlier micro-batches reduce nothing.
        if self._wrapper.require_backward_grad_sync:
            self._reached.add(id(parameter))

    @property
    def seen(self) -> bool:
        """Return True after such a backward."""
        return bool(self._reached)

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def check(self) -> None:
        """Check that all parameters were reached. Raises ModelError if some were not; they are named."""
        unused = [name for key, name in self._names.items() if key not in self._reached]
        if not unused:
            return
        raise ModelError(
            f"the loss does not depend on {len(unused)} of {len(self._names)} trained parameters: "
            f"{listed(unused, _SHOWN)}. Their gradients cannot be reduced over ranks. Freeze them "
            "(requires_grad_(False)), use them in the loss, or set ddp_find_unused_parameters=True "
            "(DistributedDataParallelKwargs(find_unused_parameters=True)), which costs a walk of the graph per update "
            "and does not work with blocks that are recomputed with use_reentrant=True"
        )


class SameOnAllRanks:
    """Checks, before each update, that the backward of every rank reached the same parameters of a sharded model.

    The gradients of a unit are reduced in one message that does not name their parameters: if ranks reached different
    parameters, gradients of one would be added to those of another, and nothing would fail. Ranks compare four numbers:
    with the sum of the gradient norm if that is made on the host, else in an exchange between hosts while devices work.
    """

    def __init__(self, module: nn.Module, loss_ranks: Gang) -> None:
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._loss_ranks = loss_ranks
        self._reached: list[bool] = []
        self._sums: Sequence[float] | None = None
        self._pending: Pending | None = None
        self._noted: set[int] = set()

    def note(self, parameter: nn.Parameter) -> None:
        """The backward reached `parameter`, whose gradient is freed before it could be found."""
        self._noted.add(id(parameter))

    def numbers(self) -> list[float]:
        """What the backward of this rank reached. The sums of these numbers over ranks are for `compare`."""
        self._reached = [p.grad is not None or id(p) in self._noted for p in self._trained.values()]
        # One number for thousands of parameters; two ranks that differ have the same once in four thousand million
        # times.
        code = zlib.crc32(bytes(self._reached))
        # Numbers of ranks are equal if their variance is zero. In halves, so that squares are exact.
        halves = [float(code & 0xFFFF), float(code >> 16)]
        return [*halves, *(half * half for half in halves)]

    def compare(self, sums: Sequence[float]) -> None:
        """Take the sums of an exchange that was made for another purpose, for the next `check`."""
        self._sums = sums

    def ask(self) -> None:
        """Start an exchange of its own, for the next `check`. Collective."""
        self._pending = self._loss_ranks.start_sum(self.numbers())

    def forget(self) -> None:
        """A forward begins: what was compared is not about its gradients."""
        self._sums = None

    def check(self) -> None:
        """Collective. Raises ModelError if only some ranks reached a parameter; they are named."""
        if self._pending is None and self._sums is None:
            self.ask()
        if self._pending is not None:
            self._sums, self._pending = self._pending.wait(), None
        sums, self._sums = self._sums, None
        self._noted.clear()
        assert sums is not None
        if any(
            square * self._loss_ranks.size != total * total
            for total, square in zip(sums[:2], sums[2:], strict=True)
        ):
            raise self._difference(
                [name for name, here in zip(self._trained, self._reached, strict=True) if here]
            )

    def _difference(self, here: list[str]) -> ModelError:
        # All ranks come here or none: they have compared the same sums.
        everywhere: list[list[str]] = self._loss_ranks.gather_objects(here)
        common = set(everywhere[0]).intersection(*everywhere)
        lines = []
        for rank, names in enumerate(everywhere):
            more = [name for name in names if name not in common]
            shown = ", ".join(more[:_SHOWN]) + (" ..." if len(more) > _SHOWN else "")
            lines.append(f"\n  rank {rank}: {shown or 'none of them'}")
        return ModelError(
            "the loss depends on different parameters on different ranks, whose gradients cannot be reduced together. "
            f"Beside those that all ranks reached:{''.join(lines)}\nUse the same ones on every rank, or set "
            "ddp_find_unused_parameters=True (DistributedDataParallelKwargs(find_unused_parameters=True)), which uses "
            "zeros for the gradients of the others"
        )
