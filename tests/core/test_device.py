"""A process that trains on the CPU keeps the memory that an update frees; copies to devices."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from tests.dist.launch import run_script
from torch import Tensor

from windlass.core.trees import send_to_device
from windlass.trainer.losses import on_device

# Tensors of 1 MiB, 128 of them: made and dropped before anything is counted, so that the C library has them or not.
# What it would do by itself depends on what was freed before: here it gives back each block of 128 KiB or more.
PROGRAM = """
import ctypes
import resource
import torch
from windlass.core.device import make_current

M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
make_current(torch.device("cpu"))

def update():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(1 << 18) for _ in range(128)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

update()
print("faults", min(update() for _ in range(3)))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
@pytest.mark.parametrize(
    ("environ", "keeps"),
    [
        ({}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, False),
    ],
)
def test_memory_that_an_update_frees_is_kept_unless_the_user_says_otherwise(
    tmp_path: Path, environ: dict[str, str], keeps: bool
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    faults = int(run_script(tmp_path / "program.py", environ=environ).split("faults")[1])
    # A page for each 4 KiB of 128 MiB if it was given back.
    assert (faults < 4000) is keeps, faults


@pytest.mark.parametrize(("kind", "ahead"), [("mps", False), ("cpu", False), ("cuda", True)])
def test_copies_that_pytorch_would_get_wrong_are_waited_for(kind: str, ahead: bool) -> None:
    told: list[bool] = []

    class Moved(Tensor):
        def to(self, device: torch.device, non_blocking: bool = False) -> Moved:  # type: ignore[override]
            assert device.type == kind
            told.append(non_blocking)
            return self

    device = torch.device(kind)
    on_device({"x": torch.ones(1).as_subclass(Moved)}, device, None)
    send_to_device(torch.ones(1).as_subclass(Moved), device, non_blocking=True)
    assert set(told) == {ahead}
