"""The order in which gradients become complete, which must be that of all ranks: DeepSpeed sums gradients by it."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.dist.gang import Gang

# The squares of all ranks' numbers below it have a sum that is exact in double precision, of up to 9000 ranks.
_NUMBERS = 1_000_003


class GradientOrder:
    """Compares between ranks which parameters the backwards of an update have reached, and in which order.

    DeepSpeed joins gradients as they become complete, and sums what lies in the same place on all ranks. If one of
    them has used other parameters, it sums the gradients of different ones, without an error where sizes are equal.

    Args:
        module: its trained parameters are followed.
        loss_ranks: over which gradients are summed.
    """

    def __init__(self, module: nn.Module, loss_ranks: Gang) -> None:
        self._loss_ranks, self._found = loss_ranks, 0
        # Stage 3 reduces the gradients of a layer of experts together, in the order of its parameters.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._complete, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(module.parameters(), 1)
            if parameter.requires_grad and not hasattr(parameter, "ds_z3_leaf_module")
        ]

    def _complete(self, number: int, _: Tensor) -> None:
        self._found = (self._found * 8191 + number) % _NUMBERS

    def begin_again(self) -> None:
        """Forget the backwards of an update that is discarded."""
        self._found = 0

    def check(self) -> None:
        """Raise ModelError if ranks differ, before their gradients are used. Ends an update. Collective."""
        mine, self._found = self._found, 0
        total, squares = self._loss_ranks.start_sum([float(mine), float(mine * mine)]).wait()
        # Both are equal for equal numbers alone (Cauchy and Schwarz).
        if self._loss_ranks.size * int(squares) != int(total) ** 2:
            raise ModelError(
                "ranks have used different parameters of the model in this update, or in a different order, and "
                "DeepSpeed sums gradients by their order: use all of them in each forward, or train without DeepSpeed "
                "(fsdp=True with ddp_find_unused_parameters=True)"
            )

    def remove(self) -> None:
        """Follow the parameters no longer."""
        for hook in self._hooks:
            hook.remove()
