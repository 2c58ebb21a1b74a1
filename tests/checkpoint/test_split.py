"""Weights in several files: what a reader finds if a save over an earlier one stops anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.faults import CountingFiles, failing, vanish
from tests.checkpoint.test_faults import in_child
from tests.checkpoint.test_weights import Tied
from torch import nn

from windlass.checkpoint.split import SPLIT_INDEX_NAME, save_split
from windlass.checkpoint.stored import load_folder
from windlass.core.errors import CheckpointError


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def test_files_keep_to_the_limit_and_the_index_has_the_ties(tmp_path: Path) -> None:
    tied, untied = Tied(), Tied(tie=False)
    untied.register_buffer("mirror", torch.zeros(6, 4))
    written = save_split(tmp_path, tied.state_dict(), limit=80)
    assert len(written) == 4, "96 bytes, 8 and 64 bytes, 16 bytes, and the index"
    load_folder(tmp_path, untied)
    assert torch.equal(untied.head.weight, tied.head.weight)
    with pytest.raises(CheckpointError, match="only plain dense tensors can be saved"):
        save_split(tmp_path, {"a": torch.ones(30), "b": torch.eye(2).to_sparse()}, limit=80)
    assert {path.name for path in tmp_path.iterdir()} == set(written), "it is found before a file is written"


def test_files_of_another_split_are_removed(tmp_path: Path) -> None:
    state = model_of(1.0).state_dict()
    size = sum(tensor.nbytes for tensor in state.values())
    for limit, count in ((24, 4), (size, 1), (size - 1, 3), (24, 4)):
        cut_off = tmp_path / "tmp-model-00001-of-00009.safetensors"
        cut_off.touch()
        written = save_split(tmp_path, state, limit)
        assert len(written) == count
        assert {path.name for path in tmp_path.iterdir()} == set(written)


def test_what_is_elsewhere_is_written_in_the_dtype_of_its_place(tmp_path: Path) -> None:
    place = torch.empty(2, dtype=torch.bfloat16, device="meta")
    save_split(
        tmp_path, {"a": place}, 80, offloaded=lambda name: torch.tensor([1.0, 2.0], dtype=torch.float64)
    )
    assert load_file(tmp_path / "model.safetensors")["a"].dtype == torch.bfloat16


@pytest.mark.parametrize("file", ["a", "b"])
def test_a_tensor_in_two_files_is_read_from_the_one_that_the_index_names(tmp_path: Path, file: str) -> None:
    """As of a model whose files were replaced in part."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        tensors = {"weight": torch.full((2, 2), value), "bias": torch.full((2,), value)}
        save_file(tensors, tmp_path / f"{name}.safetensors", {"format": "pt"})
    places = {"weight": f"{file}.safetensors", "bias": f"{'ab'[file == 'a']}.safetensors"}
    (tmp_path / SPLIT_INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    model = nn.Linear(2, 2)
    load_folder(tmp_path, model)
    values = (model.weight[0, 0].item(), model.bias[0].item())
    assert values == ((1.0, 2.0) if file == "a" else (2.0, 1.0))


@pytest.mark.parametrize("fault", [vanish, failing()])
def test_no_reader_finds_weights_of_two_saves(tmp_path: Path, fault: object) -> None:
    number, found, count = 0, set[float](), -1
    while True:
        number += 1
        folder = tmp_path / str(number)
        save_split(folder, model_of(1.0).state_dict(), limit=24)
        files = CountingFiles(number, fault)  # type: ignore[arg-type]
        code = in_child(lambda: save_split(folder, model_of(2.0).state_dict(), 24, files))  # noqa: B023
        loaded = model_of(0.0)
        if not (folder / SPLIT_INDEX_NAME).exists():
            with pytest.raises(CheckpointError, match="holds no weights"):
                load_folder(folder, loaded)
        else:
            load_folder(folder, loaded)
            values = torch.cat([parameter.flatten() for parameter in loaded.parameters()]).unique().tolist()
            assert len(values) == 1, "parts of both"
            found.update(values)
        if code == 0:
            break
        save_split(folder, model_of(3.0).state_dict(), limit=24)
        load_folder(folder, loaded)
        assert {value for p in loaded.parameters() for value in p.detach().flatten().tolist()} == {3.0}
        assert count in (-1, len(list(folder.iterdir())))
        count = len(list(folder.iterdir()))
    assert found == {1.0, 2.0}
    assert number > 10
