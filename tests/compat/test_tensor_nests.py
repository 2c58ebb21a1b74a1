from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.dist.launch import on_ranks
from tests.dist.same import assert_same
from transformers import trainer_pt_utils as reference
from transformers import trainer_utils
from transformers.training_args import ParallelMode as TheirMode

from windlass import PartialState
from windlass.compat import script_helpers, tensor_nests
from windlass.compat import tensor_nests as ours
from windlass.config.enums import ParallelMode

NEST = {"a": torch.arange(6.0).reshape(2, 3), "b": [torch.ones(2), (torch.tensor([1, 2]),)]}
WIDER = {"a": torch.arange(8.0).reshape(2, 4), "b": [torch.zeros(3), (torch.tensor([3]),)]}
ARRAYS = (np.arange(6).reshape(2, 3), [np.ones((2, 2, 2), np.float32)])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("nested_numpify", (NEST,)),
        ("nested_numpify", ([torch.ones(2, dtype=torch.bfloat16)],)),
        ("nested_detach", ({**NEST, "name": "text"},)),
        ("nested_truncate", (NEST, 1)),
        ("nested_truncate", (ARRAYS, 1)),
        ("nested_concat", (NEST, WIDER)),
        ("nested_concat", (WIDER, NEST, 7)),
        ("nested_concat", (ARRAYS, (np.arange(2).reshape(1, 2), [np.ones((1, 4, 2), np.float32)]))),
        ("nested_concat", (torch.tensor(1.0), torch.tensor(2.0))),
        ("nested_new_like", (ARRAYS, 5)),
        ("expand_like", (ARRAYS[0], 5)),
        ("expand_like", (ARRAYS[1][0], 4, 0)),
        ("atleast_1d", (torch.tensor(3.0),)),
        ("atleast_1d", (3.0,)),
        ("torch_pad_and_concatenate", (torch.ones(2, 3), torch.zeros(1, 5))),
        ("numpy_pad_and_concatenate", (np.ones((2, 3)), np.zeros((1, 5)))),
        ("numpy_pad_and_concatenate", (np.array(1.0), np.array(2.0))),
        ("find_batch_size", ({"x": "text", "y": [torch.tensor(1.0), np.ones((4, 2))], "z": torch.ones(3)},)),
        ("find_batch_size", (["text"],)),
        ("nested_gather", (NEST, None)),
        ("nested_gather", (None, None)),
    ],
)
def test_results_are_those_of_the_reference(name: str, arguments: tuple[Any, ...]) -> None:
    assert_same(getattr(ours, name)(*arguments), getattr(reference, name)(*arguments))


def test_detached_tensors_have_no_graph() -> None:
    assert not ours.nested_detach([torch.ones(2, requires_grad=True) * 2])[0].requires_grad


def test_numbers_of_metrics() -> None:
    metrics = {
        "a": np.float32(0.5),
        "b": [torch.tensor(2), torch.tensor([3.0])],
        "c": (torch.ones(2), "x", 1),
    }
    found, wanted = ours.denumpify_detensorize(metrics), trainer_utils.denumpify_detensorize(metrics)
    assert_same(found, wanted)
    assert type(found["a"]) is float


@pytest.mark.parametrize("joined", [True, False])
def test_a_container_collects_batches_as_the_reference(joined: bool) -> None:
    found, wanted = ours.EvalLoopContainer(joined, -1), reference.EvalLoopContainer(joined, -1)
    for container in (found, wanted):
        assert container.get_arrays() is None
        container.add((torch.ones(2, 3), [torch.tensor([1, 2])]))
        container.add((torch.zeros(1, 5), [torch.tensor([3])]))
        container.to_cpu_and_numpy()
        container.add((torch.zeros(1, 6), [torch.tensor([4])]))
    assert_same(found.tensors, wanted.tensors)
    assert_same(found.get_arrays(), wanted.get_arrays())
    assert found.tensors is None


@pytest.mark.parametrize(
    "pair", [([1], [1]), ([torch.ones(1)], (torch.ones(1),)), (torch.ones(1), np.ones(1))]
)
def test_nests_that_cannot_be_joined_are_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match="joined"):
        ours.nested_concat(*pair)


def test_without_a_process_group_gathering_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no process group"):
        ours.distributed_concat(torch.ones(1))


@pytest.mark.dist
def test_two_processes_gather_as_the_reference(tmp_path: Path) -> None:
    on_ranks(2, main, tmp_path)


# --- what each rank runs ----------------------------------------------------------------------------------------------


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
    with contextlib.suppress(FileNotFoundError), script_helpers.torch_distributed_zero_first(rank):
        (folder / "absent").read_text()  # on the first, the others find out themselves
    state.destroy_process_group()
