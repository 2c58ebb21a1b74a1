"""The transforms of a model in order: kernels replace parts, layers multiply in float8, blocks are recomputed,
compilation traces through them.

Wrappers for data parallelism follow, from the executor that owns them.
"""

from __future__ import annotations

from torch import nn

from windlass.config.plan import Float8Plan, TransformPlan
from windlass.transforms.compile import apply_compile
from windlass.transforms.float8 import apply_float8
from windlass.transforms.liger import apply_liger
from windlass.transforms.recompute import apply_recompute


def apply_transforms(model: nn.Module, plan: TransformPlan, float8: Float8Plan | None = None) -> nn.Module:
    """Transform `model` in place; names in its state dict do not change.

    Args:
        float8: how linear layers multiply; None leaves them as they are.

    Raises:
        ConfigError: a transform cannot be applied to this model.
    """
    if plan.liger is not None:
        apply_liger(model, plan.liger)
    if float8 is not None:
        apply_float8(model, float8)
    if plan.recompute:
        apply_recompute(model, plan.recompute_options)
    if plan.compile is not None:
        apply_compile(model, plan.compile)
    return model
