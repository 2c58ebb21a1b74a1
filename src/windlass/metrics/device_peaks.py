"""The largest rates of devices, for the model FLOPs utilisation (MFU).

Dense matrix products with float32 sums, in 10^12 operations a second, without sparsity, from the data sheets of the
makers. Devices are known by the exact name that PyTorch reports: boards of one family differ. One that is not here has
no MFU.
"""

from __future__ import annotations

import torch


def _rates(half: float, tf32: float, fp32: float, **more: float) -> dict[str, float]:
    return {"bf16": half, "fp16": half, "tf32": tf32, "fp32": fp32, **more}


# NVIDIA H100 data sheet (2023), NVIDIA H200 data sheet (2024): halves of the figures "with sparsity".
_H100_SXM = _rates(989.4, 494.7, 66.9, fp8=1978.9)
_H100_PCIE = _rates(756.4, 378.2, 51.2, fp8=1512.9)
# NVIDIA A100 Tensor Core GPU data sheet (2021).
_A100 = _rates(312.0, 156.0, 19.5)
# NVIDIA V100 data sheet (2020); without bfloat16.
_V100 = {"fp16": 125.0, "fp32": 15.7}
# NVIDIA L4 and L40S data sheets (2023): halves of the figures "with sparsity".
_L4 = _rates(121.0, 60.0, 30.3, fp8=242.5)
_L40S = _rates(362.05, 183.0, 91.6, fp8=733.0)

PEAKS: dict[str, dict[str, float]] = {
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "Tesla V100-SXM2-16GB": _V100,
    "Tesla V100-SXM2-32GB": _V100,
    # NVIDIA T4 data sheet (2019); without bfloat16.
    "Tesla T4": {"fp16": 65.0, "fp32": 8.1},
    "NVIDIA L4": _L4,
    "NVIDIA L40S": _L40S,
    # AMD Instinct MI300X data sheet (2023).
    "AMD Instinct MI300X": _rates(1307.4, 653.7, 163.4, fp8=2614.9),
}


def peak_flops(name: str, dtype: str) -> float | None:
    """Return the FLOPs a second of the device `name` in "bf16", "fp16", "tf32", "fp32" or "fp8"; None if unknown."""
    rate = PEAKS.get(name, {}).get(dtype)
    return None if rate is None else rate * 1e12


def device_peak(device: torch.device, dtype: str) -> float | None:
    """Return the FLOPs a second of a device of this process; None if unknown, as of every CPU."""
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
