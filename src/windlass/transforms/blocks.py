"""The repeated blocks of a model, which are recomputed or compiled one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost repeated blocks: modules with layers inside, of a class that occurs twice in their list."""
    taken: set[nn.Module] = set()
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        blocks = [member for member in model if _is_block(member)]
        counts = Counter(type(block) for block in blocks)
        taken = {block for block in blocks if counts[type(block)] > 1}
    for child in model.children():  # each once, even if one block occurs several times
        if child in taken:
            yield child
        else:
            yield from repeated_blocks(child)


def _is_block(module: nn.Module) -> bool:
    """Exclude bare torch layers (`nn.Linear`): there is nothing to gain from them alone."""
    composite = next(module.children(), None) is not None or not type(module).__module__.startswith(
        "torch.nn"
    )
    return composite and next(module.parameters(), None) is not None
