"""Plain values between processes, as JSON over a host-side process group: what is received is never unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any, group: Any = None) -> list[Any]:
    """Every rank's value, in rank order.

    Args:
        value: what JSON can carry, NaN and infinities included.
        group: a process group whose backend carries host tensors (gloo); None is the default group.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([text.numel()]), group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: text.numel()] = text
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    return [json.loads(got[:length].numpy().tobytes()) for got, length in zip(received, lengths, strict=True)]
