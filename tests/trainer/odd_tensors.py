"""A model with buffers and parameters of every dtype and layout, all of which its forward reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.trainer.small import Net
from torch import Tensor, nn


def _ones(dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: torch.tensor([0, 1, 1, 0]).to(dtype)


DTYPES = {
    str(dtype).removeprefix("torch."): _ones(dtype)
    for dtype in (
        torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint64, torch.bfloat16,
        torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
    )
}  # fmt: skip
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.tensor(3.0),
    "scalar_bool": lambda: torch.tensor(True),
    "empty": lambda: torch.empty(0, 4),
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 4),
    "expanded_bool": lambda: torch.tensor(True).expand(4),
    "turned": lambda: torch.arange(12.0).reshape(3, 4).T,
    "stepped": lambda: torch.arange(8.0)[::2],
}
BUFFERS = {**DTYPES, **LAYOUTS}


class Odd(Net):
    """Every buffer changes in each training forward, where its dtype can, and the loss depends on it."""

    def __init__(self, persistent: bool = True, sparse: bool = False) -> None:
        super().__init__()
        for name, make in BUFFERS.items():
            self.register_buffer(f"b_{name}", make(), persistent=persistent)
        for name, make in DTYPES.items():
            if name != "bfloat16" and name != "float64":
                self.register_parameter(f"p_{name}", nn.Parameter(make(), requires_grad=False))
        self.p_empty = nn.Parameter(torch.empty(0, 4))
        self.p_phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        if sparse:
            self.register_buffer("graph", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> object:
        total = sum(_mean(tensor) for name, tensor in self._odd())
        if self.training and torch.is_grad_enabled():
            for name, buffer in list(self.named_buffers()):
                if name != "graph":
                    _advance(buffer)
        if hasattr(self, "graph"):
            x = x @ self.graph.to_dense()
        x = x * (1 + 1e-3 * total) * self.p_phase.abs() + self.p_empty.sum()
        return super().forward(x, labels)

    def _odd(self) -> list[tuple[str, Tensor]]:
        named = [*self.named_parameters(), *self.named_buffers()]
        return [
            (name, tensor.detach()) for name, tensor in named if name[:2] in ("b_", "p_") and tensor.numel()
        ]


def _mean(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.to(torch.float32).mean()


def _advance(buffer: Tensor) -> None:
    """Another value, the next one of few: the same bits wherever it is computed."""
    own = buffer[..., :1] if 0 in buffer.stride() and buffer.dim() else buffer
    with torch.no_grad():
        if own.dim() == 1 and buffer.dim() and buffer.stride(0) == 0:
            own = buffer[:1]
        if own.dtype == torch.bool:
            own.copy_(own.logical_not())
        elif own.numel():
            own.copy_((own.to(torch.complex64 if own.is_complex() else torch.float32) + 1).to(own.dtype))
