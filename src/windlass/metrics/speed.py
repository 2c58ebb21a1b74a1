"""How fast a run is: per second, and against what the device could do."""

from __future__ import annotations

import torch

from windlass.core.clock import seconds_since

# Dense matrix-product peak of one device in FLOP/s: bf16 or fp16 on tensor cores, without sparsity, from the
# makers' data sheets. The first name contained in the device's own counts: longer names before their beginnings.
PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2.25e15),
    ("B100", 1.75e15),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("A30", 165e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
    ("MI250X", 383e12),
)


def speed_metrics(
    prefix: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Seconds since `start_time` (a `Moment` or `time.time()`), and the rates of what is given, named `{prefix}_...`.

    Returns:
        `{prefix}_runtime` in seconds (4 digits), `{prefix}_samples_per_second`, `_steps_per_second` and
        `_tokens_per_second` (3 digits); the rates are left out where no time passed.
    """
    runtime = seconds_since(start_time)
    metrics = {f"{prefix}_runtime": round(runtime, 4)}
    if runtime <= 0:
        return metrics
    for name, count in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
        if count is not None:
            metrics[f"{prefix}_{name}_per_second"] = round(count / runtime, 3)
    return metrics


def training_flops(parameters: int, tokens: float) -> float:
    """FLOPs of forward and backward, attention scores left out: 6 per parameter and token (arXiv:2001.08361)."""
    return 6.0 * parameters * tokens


def model_flops_utilisation(tokens_per_second: float, flops_per_token: float, peak_flops: float) -> float:
    """The share of the devices' peak that the model's own FLOPs take (MFU, Chowdhery et al., arXiv:2204.02311).

    Args:
        tokens_per_second: of the whole job.
        flops_per_token: forward and backward, such as `training_flops(parameters, 1)`; recomputed work not counted.
        peak_flops: FLOP/s of all devices of the job together.

    Raises:
        ValueError: the peak is not positive.
    """
    if peak_flops <= 0:
        raise ValueError(f"peak_flops={peak_flops} must be positive")
    return tokens_per_second * flops_per_token / peak_flops


def peak_flops(device: torch.device | str) -> float | None:
    """Half-precision peak of one device in FLOP/s, or None where it is not in the table (a CPU, a new GPU).

    `device` may be a device or a device's name.
    """
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return None
        device = torch.cuda.get_device_name(device)
    return next((peak for name, peak in PEAK_FLOPS if name in device), None)
