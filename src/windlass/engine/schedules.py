"""Schedules of pipelines, as `torch.distributed.pipelining` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from windlass.config.plan import PipelinePlan
from windlass.core.errors import ConfigError, Problem
from windlass.core.optional import is_older
from windlass.transforms.pipeline_stage import PipelineStage


def check_schedule(plan: PipelinePlan) -> None:
    """Raise ConfigError if this torch does not have the schedule: before 2.11 a stage of "ZBVZeroBubble" sends to its
    own rank.
    """
    if plan.schedule == "ZBVZeroBubble" and is_older(torch, "2.11"):
        fix = (
            f"needs torch 2.11 or newer, and {torch.__version__} is installed: "
            'pip install --upgrade "torch>=2.11", or choose InterleavedZeroBubble'
        )
        raise ConfigError(Problem("pp_schedule", plan.schedule, fix))


def build_schedule(
    plan: PipelinePlan, stages: Sequence[PipelineStage], micro_batches: int
) -> tuple[Any, int]:
    """The schedule of an update, and the micro-batches that it makes: at least so many, and as many as it needs.

    Raises:
        ConfigError: the schedule takes no such number.
    """
    name = plan.schedule
    if name == "1F1B" and micro_batches < plan.size:
        name = "GPipe"  # 1F1B refuses so few, and its order would be the same
    kind: Any = get_schedule_class(name)
    given = stages[0] if issubclass(kind, PipelineScheduleSingle) else list(stages)
    problem: Exception | None = None
    for count in range(micro_batches, micro_batches + 2 * plan.size + 1):
        if not issubclass(kind, PipelineScheduleSingle) and count < plan.size:
            continue
        try:
            # `scale_grads` would divide by the number of micro-batches: each loss is its share of the update already.
            return kind(given, count, loss_fn=_loss_itself, scale_grads=False), count
        except ValueError as error:
            problem = error
    fix = f"{name} does not take this number of micro-batches ({problem}): use a multiple of {plan.size}"
    raise ConfigError(Problem("gradient_accumulation_steps", micro_batches, fix))


def _loss_itself(output: Any, target: Any) -> Any:
    """The last stage returns the loss of its micro-batch."""
    return output
