"""The transforms of a model, in the order in which they are safe.

Recomputation first: it marks blocks that compilation then traces through. Wrappers for data parallelism come last of
all, from the executor that owns them.
"""

from __future__ import annotations

from torch import nn

from windlass.config.plan import TransformPlan
from windlass.transforms.compile import apply_compile
from windlass.transforms.recompute import apply_recompute


def apply_transforms(model: nn.Module, plan: TransformPlan) -> nn.Module:
    """`model` itself, changed in place; its state's names stay what they were.

    Raises:
        ConfigError: a transform cannot be done to this model.
    """
    if plan.recompute:
        apply_recompute(model, plan.recompute_options)
    if plan.compile_backend is not None:
        apply_compile(model, plan.compile_backend, plan.compile_mode)
    return model
