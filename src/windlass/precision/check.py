"""Autocast, and checks before the first step that the device and the model support the configured precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.plan import Float8Plan, PrecisionPlan
from windlass.core.attributes import text_config
from windlass.core.errors import Problem, refuse
from windlass.core.logs import get_job_logger
from windlass.core.optional import install_command, is_available, is_older

_log = get_job_logger(__name__)

_any_device: ContextVar[bool] = ContextVar("any_device", default=False)
_FLOAT8_SINCE = (8, 9)  # Ada; Hopper and later have it too
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Before torch 2.11 a forward without gradients left its casts to the next forward of the same context, in which these
# weights then got no gradient.
_CACHE_DEFAULT = False if is_older(torch, "2.11") else None


def autocast(
    kind: str, dtype: torch.dtype, *, enabled: bool = True, cache_enabled: bool | None = None
) -> torch.autocast:
    """`torch.autocast` on a kind of device. `cache_enabled`: None chooses what gives each forward its gradients."""
    cache = _CACHE_DEFAULT if cache_enabled is None else cache_enabled
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)


def autocast_context(plan: PrecisionPlan, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A function that returns the context of one forward; a null context for fp32.

    Each call returns a new one: a `torch.autocast` object stores the state on entry, so if the same object were entered
    twice (a forward inside a forward), autocast would stay enabled.
    """
    dtype = COMPUTE_DTYPES.get(plan.compute)
    if dtype is None:
        return nullcontext
    return partial(autocast, device.type, dtype)


def check_precision(
    plan: PrecisionPlan, device: torch.device, model: nn.Module | None = None, evaluated_in: str | None = None
) -> None:
    """Check the precision. Raises ConfigError if the device lacks a dtype, float8 or TF32, or trained weights are
    float16.

    Args:
        model: one that is trained; None checks the device alone.
        evaluated_in: the dtype to which evaluations cast weights, "bf16" or "fp16"; None if they do not.
    """
    problems = [*_device_problems(plan, device, evaluated_in)]
    if model is not None:
        problems += _weight_problems(model.named_parameters())
        _warn_of_infinite_masks(model)
    refuse(problems)


def _warn_of_infinite_masks(model: nn.Module) -> None:
    """Warn of the "eager" attention of transformers in float64, whose softmax in float32 makes its mask infinite: a
    token that sees no other one, as padding more than a window away from the last token of its row, becomes NaN.
    """
    text = text_config(model)
    window = getattr(text, "sliding_window", None)
    eager = getattr(text, "_attn_implementation", None) == "eager"
    if window and eager and any(p.dtype is torch.float64 for p in model.parameters()):
        _log.warning(
            "attn_implementation='eager' in float64: rows that are padded by more than the window of %d tokens become "
            "NaN in the attention of transformers; load the model with attn_implementation='sdpa'",
            window,
        )


def check_weights(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if `optimizer` updates weights in float16."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    refuse(_weight_problems((f"parameter {index} of the optimizer", p) for index, p in enumerate(held)))


@contextlib.contextmanager
def for_any_device() -> Iterator[None]:
    """Within the body, devices have all formats: a run is planned for another one than this machine has."""
    token = _any_device.set(True)
    try:
        yield
    finally:
        _any_device.reset(token)


def apply_tf32(plan: PrecisionPlan) -> None:
    """Set TF32 for fp32 matrix products and convolutions on CUDA devices; None keeps torch's setting."""
    if plan.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = plan.tf32
        torch.backends.cudnn.allow_tf32 = plan.tf32


def _device_problems(plan: PrecisionPlan, device: torch.device, evaluated_in: str | None) -> list[Problem]:
    problems: list[Problem] = []
    if _any_device.get():
        return problems
    wanted = {plan.compute: plan.compute, evaluated_in: f"{evaluated_in}_full_eval"}
    if "bf16" in wanted and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(device)
        problems.append(Problem(wanted["bf16"], True, f"{name} has no bfloat16; use fp16 or fp32"))
    if "fp16" in wanted and device.type == "xla":
        fix = "the loss scale is read on the host in each update, for which PyTorch/XLA would wait; use bf16"
        problems.append(Problem(wanted["fp16"], True, fix))
    if plan.float8 is not None:
        problems += _float8_problems(plan.float8, device)
    if plan.tf32 and not _has_tf32(device):
        problems.append(
            Problem("tf32", True, f"{device} has no TF32 (CUDA from Ampere on has it); leave it unset")
        )
    return problems


def _float8_problems(plan: Float8Plan, device: torch.device) -> list[Problem]:
    if not is_available("torchao"):
        fix = f"needs torchao, which is not installed: {install_command('torchao')}"
        return [Problem("mixed_precision", "fp8", fix)]
    if plan.emulate or _has_float8(device):
        return []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    fix = (
        f"{name} has no matrix products in float8, which NVIDIA's GPUs have from compute capability 8.9 on and AMD's "
        "from MI300 on; use bf16, or for a test fp8_config={'emulate': True}, which is slower than bf16"
    )
    return [Problem("mixed_precision", "fp8", fix)]


def _has_float8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        return any(
            name in torch.cuda.get_device_properties(device).gcnArchName for name in ("gfx94", "gfx95")
        )
    return torch.cuda.get_device_capability(device) >= _FLOAT8_SINCE


def _has_tf32(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= 8
    )


def _weight_problems(named: Iterable[tuple[str, Tensor]]) -> list[Problem]:
    """Updates of float16 weights below 1/4096 of them round to nothing, and so do gradients below 6e-8."""
    halves = [name for name, p in named if p.requires_grad and p.dtype is torch.float16]
    if not halves:
        return []
    fix = (
        f"{len(halves)} trained parameters are float16 ({halves[0]}, ...), whose small updates would round to nothing; "
        "load the model with dtype=torch.float32 (fp16=True still computes in float16), or in bfloat16"
    )
    return [Problem("dtype", "float16", fix)]
