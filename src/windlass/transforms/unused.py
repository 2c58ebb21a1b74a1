"""Which parameters a backward did not reach, found in a replicated model's first update."""

from __future__ import annotations

from torch import Tensor, nn

from windlass.core.errors import ModelError

_SHOWN = 10


class ReachedParameters:
    """Watches one update's last backward, by hooks that are gone afterwards: later updates cost nothing.

    Replicas reduce gradients in buckets, and a bucket that waits for a parameter nothing was computed with is never
    reduced. PyTorch says so at the next forward, when the optimizer has stepped on gradients that differ between ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        self._reached: set[int] = set()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._note) for p in module.parameters() if p.requires_grad
        ]

    def _note(self, parameter: Tensor) -> None:
        self._reached.add(id(parameter))

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
