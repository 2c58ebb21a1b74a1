"""Parameters that a backward did not reach: in a replicated model's first update, or on some ranks of a sharded one."""

from __future__ import annotations

import zlib

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from windlass.core.errors import ModelError
from windlass.dist.gang import Gang, Pending

_SHOWN = 10


class ReachedParameters:
    """Watches the first backward that reduces gradients, by hooks that go with its update: later ones cost nothing.

    Replicas reduce gradients in buckets, and a bucket that waits for a parameter nothing was computed with is never
    reduced. PyTorch says so at the next forward, when the optimizer has stepped on gradients that differ between ranks.

    Args:
        module: the model.
        wrapper: its replica, which knows whether a backward reduces.
    """

    def __init__(self, module: nn.Module, wrapper: DistributedDataParallel) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in trained.items()}
        self._wrapper = wrapper
        self._reached: set[int] = set()
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in trained.values()]  # type: ignore[no-untyped-call]

    def _note(self, parameter: Tensor) -> None:
        if self._wrapper.require_backward_grad_sync:
            self._reached.add(id(parameter))

    @property
    def seen(self) -> bool:
        """There was such a backward."""
        return bool(self._reached)

    def stop(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def check(self) -> None:
        """Look at what the hooks saw.

        Raises:
            ModelError: names the parameters that the backward did not reach.
        """
        unused = [name for key, name in self._names.items() if key not in self._reached]
        if not unused:
            return
        more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        raise ModelError(
            f"the loss does not depend on {len(unused)} of {len(self._names)} trained parameters: "
            f"{', '.join(unused[:_SHOWN])}{more}. Their gradients cannot be reduced over ranks. Freeze them "
            "(requires_grad_(False)), use them in the loss, or set ddp_find_unused_parameters=True "
            "(DistributedDataParallelKwargs(find_unused_parameters=True)), which costs a walk of the graph per update"
        )


class SameOnAllRanks:
    """Finds out, before each update, whether every rank's backward reached the same parameters of a sharded model.

    The gradients of a unit travel in one message that does not say whose they are: where ranks reached different
    parameters, those of one would be added to those of another, and nothing would fail. Costs one exchange of four
    numbers between hosts for each update, while devices are at work and the norm is summed.
    """

    def __init__(self, module: nn.Module, gang: Gang) -> None:
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._gang = gang
        self._asked: tuple[list[bool], Pending] | None = None

    def ask(self) -> None:
        """Begin the exchange, when the update's gradients are there; what `check` then waits for is under way."""
        reached = [p.grad is not None for p in self._trained.values()]
        code = zlib.crc32(bytes(reached))
        # Ranks have the same number exactly where its variance is zero. In halves, so that squares stay exact.
        halves = [float(code & 0xFFFF), float(code >> 16)]
        self._asked = reached, self._gang.start_sum([*halves, *(half * half for half in halves)])

    def check(self) -> None:
        """Collective.

        Raises:
            ModelError: names parameters that only some ranks reached.
        """
        if self._asked is None:
            self.ask()
        assert self._asked is not None
        (reached, pending), self._asked = self._asked, None
        sums = pending.wait()
        if any(
            square * self._gang.size != total * total
            for total, square in zip(sums[:2], sums[2:], strict=True)
        ):
            raise self._difference([name for name, here in zip(self._trained, reached, strict=True) if here])

    def _difference(self, here: list[str]) -> ModelError:
        everywhere: list[list[str]] = self._gang.gather_objects(here)
        common = set(everywhere[0]).intersection(*everywhere)
        lines = []
        for rank, names in enumerate(everywhere):
            more = [name for name in names if name not in common]
            shown = ", ".join(more[:_SHOWN]) + (" ..." if len(more) > _SHOWN else "")
            lines.append(f"\n  rank {rank}: {shown or 'none of them'}")
        return ModelError(
            "the loss depends on different parameters on different ranks, whose gradients cannot be reduced together. "
            f"Beside those that all ranks reached:{''.join(lines)}\nUse the same ones on every rank, or set "
            "ddp_find_unused_parameters=True (DistributedDataParallelKwargs(find_unused_parameters=True)): zeros stand "
            "for the gradients of the others then"
        )
