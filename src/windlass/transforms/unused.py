"""Which parameters a backward did not reach, found in a replicated model's first update."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from windlass.core.errors import ModelError

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
