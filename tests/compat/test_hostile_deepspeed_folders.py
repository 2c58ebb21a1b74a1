"""Folders of DeepSpeed that are forged are refused with one error that names the folder, in bounded memory.

The layout is written by hand here; `test_deepspeed_folder.py` reads what DeepSpeed itself wrote.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.checkpoint.stored import open_folder, open_weights
from windlass.core.errors import CheckpointError

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


class Scaler:
    """An object of a class that the reader does not have."""


def stage_1() -> tuple[dict[str, Any], dict[str, Any]]:
    """Model and optimizer states of one rank: two parameters, of which the second is followed by one padding."""
    shapes = OrderedDict(a=torch.Size([2, 2]), b=torch.Size([3]))
    module = {name: torch.zeros(shape) for name, shape in shapes.items()}
    model = {"module": module, "param_shapes": [shapes], "shared_params": {}, "loss_scaler": Scaler()}
    optimizer = {
        "partition_count": [1],
        "single_partition_of_fp32_groups": [torch.arange(8.0)],
        "param_alignment_paddings": [[0, 1]],
        "loss_scaler": Scaler(),
        "zero_stage": 1,
    }
    return model, {"optimizer_state_dict": optimizer}


def write(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    model, optimizer = copy.deepcopy(stage_1())
    change(model, optimizer["optimizer_state_dict"])
    folder.mkdir()
    torch.save(model, folder / MODEL)
    torch.save(optimizer, folder / OPTIMIZER.format(0))
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    with open_weights(open_folder(folder)) as tensors:
        return {name: tensors.read(name) for name in tensors.names}


def test_objects_beside_the_weights_are_passed_over(tmp_path: Path) -> None:
    found = read(write(tmp_path / "folder", lambda model, optimizer: None))
    assert found["a"].tolist() == [[0, 1], [2, 3]]
    assert found["b"].tolist() == [4, 5, 6]


@pytest.mark.parametrize("rank", ["1", "9999999999", "9" * 60])
def test_the_number_in_a_name_takes_no_memory(rank: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", lambda model, optimizer: None)
    (folder / OPTIMIZER.format(0)).unlink()
    (folder / OPTIMIZER.format(rank)).touch()
    with pytest.raises(CheckpointError, match="optimizer states of rank 0 are missing"):
        read(folder)
    (folder / MODEL).unlink()
    (folder / f"zero_pp_rank_{rank}_{MODEL}").touch()
    (folder / f"zero_pp_rank_0_{MODEL}").touch()
    with pytest.raises(CheckpointError, match=r"model states of rank 1 are missing|not a zip container"):
        read(folder)


FORGED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = {
    "counts that have no hash": (lambda m, o: o.update(partition_count=[[1], {}]), "different numbers of ranks"),
    "counts that are no numbers": (lambda m, o: o.update(partition_count=[[1]]), "partition_count"),
    "a count that is text": (lambda m, o: o.update(partition_count="1"), "partition_count"),
    "no counts": (lambda m, o: o.update(partition_count=[]), "partition_count"),
    "paddings of text": (lambda m, o: o.update(param_alignment_paddings=[["a", "b"]]), "paddings"),
    "negative paddings": (lambda m, o: o.update(param_alignment_paddings=[[-4, 1]]), "paddings"),
    "fractions of paddings": (lambda m, o: o.update(param_alignment_paddings=[[0.5, 1]]), "paddings"),
    "a number for paddings": (lambda m, o: o.update(param_alignment_paddings=7), "groups"),
    "negative sizes": (lambda m, o: m["param_shapes"][0].update(a=(-1, 2)), "shape"),
    "sizes beyond the elements": (lambda m, o: m["param_shapes"][0].update(a=(1 << 50, 2)), "hold all elements"),
    "paddings that are not recorded": (
        lambda m, o: (o.pop("param_alignment_paddings"), o.update(single_partition_of_fp32_groups=[torch.ones(10)])),
        "do not fill",
    ),
    "elements of no parameter at stage 3": (
        lambda m, o: (o.pop("single_partition_of_fp32_groups"), o.update(fp32_flat_groups=[torch.ones(8)])),
        "do not fill",
    ),
    "names without a hash": (lambda m, o: m.update(shared_params={"c": ["a"]}), "shared_params"),
    "no map of the model": (lambda m, o: m.update(module=[1]), "module is not a map"),
    "no list of shapes": (lambda m, o: m.update(param_shapes=3), "param_shapes"),
    "buffers by number": (
        lambda m, o: (o.pop("single_partition_of_fp32_groups"), o.update(fp32_flat_groups=[torch.ones(8)]),
                      m.update(buffer_names=[["a"]])),
        "buffer_names",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_forged_states_are_refused_by_name(name: str, tmp_path: Path) -> None:
    change, message = FORGED[name]
    folder = write(tmp_path / "folder", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(folder)
    assert str(folder) in str(caught.value)
