"""What a forward returns whose logits are divided among ranks: by rows, or by the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(eq=False)
class DividedOutput(Mapping[str, Any]):
    """What a forward with labels returns: the loss of the whole batch, and its logits, gathered when they are read.

    All ranks that divide them must read them, or none.
    """

    loss: Tensor
    gathered: Callable[[], Tensor] | Tensor  # the logits; until they are read, what gathers them
    # The balancing loss of experts, which `loss` contains; None if there is none
    aux_loss: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Shape (rows, tokens, vocabulary), of whole rows."""
        if not isinstance(self.gathered, Tensor):
            self.gathered = self.gathered()
        return self.gathered

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int | slice):
            return self.to_tuple()[key]
        if key not in iter(self):
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(("loss", "logits") if self.aux_loss is None else ("loss", "aux_loss", "logits"))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def to_tuple(self) -> tuple[Tensor, ...]:
        """What is there, in order."""
        return tuple(getattr(self, name) for name in self)


# PyTorch's wrapper finds the loss in it.
pytree.register_pytree_node(
    DividedOutput,
    lambda output: ([output.loss], (output.gathered, output.aux_loss)),
    lambda leaves, others: DividedOutput(next(iter(leaves)), *others),
)
