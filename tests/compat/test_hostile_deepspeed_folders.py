"""Folders of DeepSpeed of any division are read; forged ones are refused by one error that names them.

The layout is written by hand here; `test_deepspeed_folder.py` reads what DeepSpeed itself wrote.
"""

from __future__ import annotations

import copy
import random
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


def divided(flat: torch.Tensor, ranks: int, multiple: int) -> list[torch.Tensor]:
    """A tensor, padded to a multiple, in as many parts as ranks."""
    padded = torch.cat([flat, torch.full((-len(flat) % multiple,), -1.0)])
    return [part.clone() for part in padded.chunk(ranks)]


def write_groups(
    folder: Path, chance: random.Random, parameters: dict[str, torch.Tensor], ranks: int
) -> None:
    """Up to stage 2: each group of the optimizer is one flat tensor, padded after parameters and at its end."""
    names = list(parameters)
    cut = chance.randint(1, len(names))
    groups = [group for group in (names[:cut], names[cut:]) if group]
    paddings = [[chance.choice([0, 0, 3]) for _ in group] for group in groups]
    parts = []
    for group, padding in zip(groups, paddings, strict=True):
        pieces = [
            torch.cat([parameters[name].flatten(), torch.full((more,), -1.0)])
            for name, more in zip(group, padding, strict=True)
        ]
        parts.append(divided(torch.cat(pieces), ranks, 2 * ranks))
    shapes = [OrderedDict((name, parameters[name].shape) for name in group) for group in groups]
    module = {name: tensor.bfloat16() for name, tensor in parameters.items()}
    torch.save({"module": module, "param_shapes": shapes, "shared_params": {}}, folder / MODEL)
    for rank in range(ranks):
        state = {
            "partition_count": [ranks] * len(groups),
            "single_partition_of_fp32_groups": [part[rank] for part in parts],
            "param_alignment_paddings": paddings,
        }
        torch.save({"optimizer_state_dict": state}, folder / OPTIMIZER.format(rank))


def write_parts(folder: Path, chance: random.Random, parameters: dict[str, torch.Tensor], ranks: int) -> None:
    """Stage 3: each parameter is divided; those of a rank follow each other in flat tensors of any size."""
    parts = {name: divided(tensor.flatten(), ranks, ranks) for name, tensor in parameters.items()}
    names = list(parameters)
    frozen, trained = names[:1] if len(names) > 1 else [], names[1:] or names
    shapes = [OrderedDict((name, parameters[name].shape) for name in trained)]
    for rank in range(ranks):
        model = {
            "module": {},
            "param_shapes": shapes,
            "frozen_param_shapes": {name: parameters[name].shape for name in frozen},
            "frozen_param_fragments": {name: parts[name][rank] for name in frozen},
        }
        torch.save(model, folder / f"zero_pp_rank_{rank}_{MODEL}")
        flat = torch.cat([parts[name][rank] for name in trained])
        sub_groups = [part.clone() for part in flat.tensor_split([len(flat) // 3, len(flat) // 2])]
        state = {"partition_count": ranks, "fp32_flat_groups": sub_groups}
        torch.save({"optimizer_state_dict": state}, folder / f"bf16_{OPTIMIZER.format(rank)}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 11])
@pytest.mark.parametrize("write_states", [write_groups, write_parts])
def test_parameters_divided_in_any_way_are_put_together(
    write_states: Callable[..., None], ranks: int, tmp_path: Path
) -> None:
    """Of more ranks and in more ways than runs of two ranks show."""
    for seed in range(5):
        chance, folder = random.Random(seed), tmp_path / str(seed)
        folder.mkdir()
        shapes = [[chance.randint(1, 4) for _ in range(chance.randint(0, 3))] for _ in range(5)]
        parameters = {
            f"p{number}": torch.randn(shape) for number, shape in enumerate(shapes[: chance.randint(1, 5)])
        }
        write_states(folder, chance, parameters, ranks)
        found = read(folder)
        assert found.keys() == parameters.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in parameters.items())
