"""A process that trains on the CPU keeps the memory that an update frees."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from tests.dist.launch import run_script

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
