"""Run by `torch.distributed.run`: adapters on replicated and on sharded models, stopped and continued."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.adapter_cases import stretch

from windlass.core.errors import CheckpointError
from windlass.dist.sharded import is_sharded

SHARDED: dict[str, Any] = {"fsdp": "full_shard"}
FILE = "adapter_model.safetensors"


def goes_on_with_the_same_bits(folder: Path, **strategy: Any) -> None:
    stretch(folder / "clean", 6, False, **strategy)
    stretch(folder / "stopped", 3, False, **strategy)
    resumed = stretch(folder / "stopped", 6, True, **strategy)
    assert any(is_sharded(p) for p in resumed.model.parameters()) == bool(strategy)
    for name in (FILE, "optimizer*.safetensors"):
        for path in (folder / "clean" / "checkpoint-6").glob(name):
            assert path.read_bytes() == (folder / "stopped" / "checkpoint-6" / path.name).read_bytes(), path
    assert not list((folder / "clean" / "checkpoint-6").glob("model*")), "the base is not written"
    with pytest.raises(CheckpointError, match="another base"):
        stretch(folder / "stopped", 6, True, seed=1, **strategy)


def goes_on_under_the_other(folder: Path, strategy: dict[str, Any], other: dict[str, Any]) -> None:
    if torch.distributed.get_rank() == 0:
        (folder / "moved").mkdir()
        shutil.copytree(folder / "stopped" / "checkpoint-3", folder / "moved" / "checkpoint-3")
    torch.distributed.barrier()
    stretch(folder / "moved", 6, True, **other)
    found, expected = (load_file(folder / run / "checkpoint-6" / FILE) for run in ("moved", "clean"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9)


def main() -> None:
    folder = Path(sys.argv[1])
    for name, strategy, other in (("replicated", {}, SHARDED), ("sharded", SHARDED, {})):
        goes_on_with_the_same_bits(folder / name, **strategy)
        goes_on_under_the_other(folder / name, strategy, other)


if __name__ == "__main__":
    main()
