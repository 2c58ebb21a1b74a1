"""Two processes: gathered nests and numbers, and one process before the other, beside transformers' own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.dist.same import assert_same
from transformers import trainer_pt_utils as reference
from transformers.training_args import ParallelMode as TheirMode

from windlass import PartialState
from windlass.compat import script_helpers, tensor_nests
from windlass.config.enums import ParallelMode


def main(folder: Path) -> None:
    state = PartialState(cpu=True)
    rank = state.process_index
    nest: Any = {"a": torch.full((2, 2), float(rank)), "b": [torch.tensor(rank), (torch.tensor([rank, 7]),)]}
    assert_same(tensor_nests.distributed_concat(nest), reference.distributed_concat(nest))
    assert_same(tensor_nests.distributed_concat(nest, 3), reference.distributed_concat(nest, 3))
    wanted = reference.nested_gather(nest, TheirMode.DISTRIBUTED)
    assert_same(tensor_nests.nested_gather(nest, ParallelMode.DISTRIBUTED), wanted)
    assert_same(tensor_nests.nested_gather(nest, TheirMode.DISTRIBUTED), wanted)
    assert tensor_nests.nested_gather(nest, ParallelMode.NOT_PARALLEL) is nest
    numbers = tensor_nests.distributed_broadcast_scalars([rank, rank + 0.5], 3, device="cpu")
    assert_same(numbers, reference.distributed_broadcast_scalars([rank, rank + 0.5], 3, device="cpu"))
    assert script_helpers.total_processes_number(rank) == 2

    with script_helpers.torch_distributed_zero_first(rank):
        made = folder / "made-by-the-first"
        if rank == 0:
            made.touch()
        assert made.exists()
    state.destroy_process_group()
