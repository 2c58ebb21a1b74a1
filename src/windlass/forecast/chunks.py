"""The chunks of a loss without logits: those between the first and the last do the same, so one of them is run for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from windlass.forecast.meter import Meter
from windlass.transforms.linear_cross_entropy import ChunkLogits, chunk_rows


@contextlib.contextmanager
def few_chunks(meter: Meter, *, on_device: bool, every: bool) -> Iterator[None]:
    """Within the body, three chunks of a head's logits are run, and the second counts for all in the middle.

    Args:
        on_device: chunks are as large as on a device; tensors without memory are on the CPU.
        every: run all of them.
    """
    own = ChunkLogits.chunks

    def chunks(logits: ChunkLogits, targets: int) -> Iterator[slice]:
        found = list(chunk_rows(targets, logits.split.chunk, on_cpu=not on_device))
        if every or len(found) <= 3:
            yield from found
            return
        yield found[0]
        with meter.repeated(len(found) - 2):
            yield found[1]
        yield found[-1]

    ChunkLogits.chunks = chunks  # type: ignore[method-assign]
    try:
        yield
    finally:
        ChunkLogits.chunks = own  # type: ignore[method-assign]
