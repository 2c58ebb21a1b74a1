"""The dtypes of a run in words: of master weights, of computation, and of the reduction of gradients over ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.config.plan import DistPlan, PrecisionPlan

if TYPE_CHECKING:
    from torch import nn

_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Names of dtypes, as of a log line."""

    weights: str  # which the optimizer updates
    compute: str  # of matrix products in forward and backward
    reduction: str  # in which gradients are summed over ranks

    def __str__(self) -> str:
        return f"master weights {self.weights}, computation {self.compute}, reduction of gradients {self.reduction}"


def dtypes_of(precision: PrecisionPlan, dist: DistPlan, weights: str) -> Dtypes:
    """The dtypes of a run whose trained weights are `weights`."""
    compute = _NAMES[precision.compute] if precision.compute != "fp32" else weights
    if precision.float8 is not None:
        compute += f" (linear layers in float8, {precision.float8.recipe})"
    if dist.shard is not None:
        gathered = _NAMES[dist.shard.param_dtype] if dist.shard.param_dtype else weights
        reduction = _NAMES[dist.shard.reduce_dtype] if dist.shard.reduce_dtype else gathered
        return Dtypes(weights, compute if precision.compute != "fp32" else gathered, reduction)
    sent = next((hook for hook in (dist.comm_hook, dist.comm_wrapper) if hook in _NAMES), None)
    return Dtypes(weights, compute, weights if sent is None else _NAMES[sent])


def weights_of(model: nn.Module) -> str:
    """The dtype of the trained weights; of several, the number of parameters of each."""
    counts = Counter(str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad)
    if len(counts) < 2:
        return next(iter(counts), "none")
    return " and ".join(f"{dtype} ({count} parameters)" for dtype, count in counts.most_common())
