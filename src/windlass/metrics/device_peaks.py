"""The largest rates of devices, for the model FLOPs utilisation (MFU) and for plans of runs.

Dense matrix products with float32 sums, in 10^12 operations a second, without sparsity; the bandwidth of memory and of
the links between devices of one machine; from the data sheets of the makers. Devices are known by the exact name that
PyTorch reports: boards of one family differ. One that is not here has no MFU.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Board(NamedTuple):
    short: str  # its name on command lines
    rates: dict[str, float]  # 10^12 operations a second, by dtype
    memory: int  # 10^9 bytes
    bandwidth: float  # of memory, 10^9 bytes a second
    # To the other devices of its machine, in one direction, 10^9 bytes a second: NVLink or Infinity Fabric where the
    # board has it, else PCI Express. Data sheets give the sum of both directions.
    link: float


BOARDS: dict[str, Board] = {
    "NVIDIA H200": Board("h200", _H100_SXM, 141, 4800.0, 450.0),
    "NVIDIA H100 80GB HBM3": Board("h100", _H100_SXM, 80, 3350.0, 450.0),
    "NVIDIA H100 PCIe": Board("h100-pcie", _H100_PCIE, 80, 2000.0, 64.0),
    "NVIDIA A100-SXM4-40GB": Board("a100-40gb", _A100, 40, 1555.0, 300.0),
    "NVIDIA A100-SXM4-80GB": Board("a100", _A100, 80, 2039.0, 300.0),
    "NVIDIA A100-PCIE-40GB": Board("a100-pcie-40gb", _A100, 40, 1555.0, 32.0),
    "NVIDIA A100 80GB PCIe": Board("a100-pcie", _A100, 80, 1935.0, 32.0),
    "Tesla V100-SXM2-16GB": Board("v100-16gb", _V100, 16, 900.0, 150.0),
    "Tesla V100-SXM2-32GB": Board("v100", _V100, 32, 900.0, 150.0),
    # NVIDIA T4 data sheet (2019); without bfloat16.
    "Tesla T4": Board("t4", {"fp16": 65.0, "fp32": 8.1}, 16, 300.0, 16.0),
    "NVIDIA L4": Board("l4", _L4, 24, 300.0, 32.0),
    "NVIDIA L40S": Board("l40s", _L40S, 48, 864.0, 32.0),
    # AMD Instinct MI300X data sheet (2023); seven links of Infinity Fabric.
    "AMD Instinct MI300X": Board("mi300x", _rates(1307.4, 653.7, 163.4, fp8=2614.9), 192, 5300.0, 448.0),
}

# Between machines, for each device, 10^9 bytes a second in one direction: the 400 Gb/s of an NVIDIA DGX H100 (its data
# sheet, 2023).
NETWORK = 50.0


def find_board(name: str) -> tuple[str, Board] | None:
    """The board of this name, that of PyTorch or the short one, whatever its case; None if it is not known."""
    wanted = name.casefold()
    return next(
        ((full, board) for full, board in BOARDS.items() if wanted in (full.casefold(), board.short)), None
    )


def peak_flops(name: str, dtype: str) -> float | None:
    """Return the FLOPs a second of the device `name` in "bf16", "fp16", "tf32", "fp32" or "fp8"; None if unknown."""
    board = BOARDS.get(name)
    rate = None if board is None else board.rates.get(dtype)
    return None if rate is None else rate * 1e12


def device_peak(device: torch.device, dtype: str) -> float | None:
    """Return the FLOPs a second of a device of this process; None if unknown, as of every CPU."""
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
