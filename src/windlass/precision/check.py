"""Checks before the first step that the device and the model support the configured precision."""

from __future__ import annotations

import torch
from torch import nn

from windlass.config.plan import PrecisionPlan
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger, warn_once

_log = get_logger(__name__)


def check_precision(plan: PrecisionPlan, device: torch.device, model: nn.Module | None = None) -> None:
    """Check the precision; warn if trainable weights have too few bits for small updates.

    Raises:
        ConfigError: the device lacks the dtype or TF32, or trainable weights are fp16 already under fp16.
    """
    problems = [*_device_problems(plan, device), *_model_problems(plan, model)]
    if problems:
        raise ConfigError(problems)
    if model is not None:
        _warn_of_low_weights(model)


def apply_tf32(plan: PrecisionPlan) -> None:
    """Set TF32 for fp32 matrix products and convolutions on CUDA devices; None keeps torch's setting."""
    if plan.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = plan.tf32
        torch.backends.cudnn.allow_tf32 = plan.tf32


def _device_problems(plan: PrecisionPlan, device: torch.device) -> list[Problem]:
    problems = []
    wanted = {plan.compute: plan.compute, plan.full_eval: f"{plan.full_eval}_full_eval"}
    if "bf16" in wanted and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(device)
        problems.append(Problem(wanted["bf16"], True, f"{name} has no bfloat16; use fp16 or fp32"))
    if "fp16" in wanted and device.type == "xla":
        fix = "the loss scale is read on the host in each update, for which PyTorch/XLA would wait; use bf16"
        problems.append(Problem(wanted["fp16"], True, fix))
    if plan.tf32 and not _has_tf32(device):
        problems.append(
            Problem("tf32", True, f"{device} has no TF32 (CUDA from Ampere on has it); leave it unset")
        )
    return problems


def _has_tf32(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= 8
    )


def _model_problems(plan: PrecisionPlan, model: nn.Module | None) -> list[Problem]:
    if plan.compute != "fp16" or model is None:
        return []
    halves = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype is torch.float16]
    if not halves:
        return []
    fix = (
        f"{len(halves)} trainable parameters are already float16 ({halves[0]}, ...), whose updates would round to "
        "nothing; load the model with dtype=torch.float32, or use bf16"
    )
    return [Problem("fp16", True, fix)]


def _warn_of_low_weights(model: nn.Module) -> None:
    """A model that was loaded in bf16 trains purely in bf16, which is easily overlooked and loses small updates."""
    dtypes = [p.dtype for p in model.parameters() if p.requires_grad]
    low = [dtype for dtype in dtypes if dtype in (torch.bfloat16, torch.float16)]
    if low:
        coarse = torch.finfo(low[0]).eps / 2
        warn_once(
            _log,
            f"{len(low)} trainable parameters are {str(low[0]).removeprefix('torch.')}: an update smaller than about "
            f"{coarse:.2g} of a weight is rounded away. Load the model with dtype=torch.float32 to keep exact weights "
            "(bf16=True still computes in bfloat16).",
        )
