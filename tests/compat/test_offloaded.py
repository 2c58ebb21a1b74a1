"""Weights that wait on disk."""

from __future__ import annotations

import json
from pathlib import Path

import accelerate.utils
import pytest
import torch
from tests.dist.launch import on_ranks
from torch import nn
from transformers.integrations import accelerate as transformers_reference

from windlass.compat.big_models.model_hooks import add_hook_to_module
from windlass.compat.big_models.offloaded import (
    AlignDevicesHook,
    OffloadedWeightsLoader,
    offload_state_dict,
    offload_weight,
    read_offload_index,
    save_offload_index,
)
from windlass.core.errors import CheckpointError, ConfigError

WEIGHTS = {
    "a.weight": torch.rand(3, 2),
    "a.bias": torch.rand(2).to(torch.bfloat16),
    "scalar": torch.tensor(7),
    "small": torch.rand(4).to(torch.float8_e4m3fn),
}


def _same(loader: OffloadedWeightsLoader, weights: dict[str, torch.Tensor]) -> bool:
    return list(loader) == list(weights) and all(
        loader[name].dtype == tensor.dtype and torch.equal(loader[name].float(), tensor.float())
        for name, tensor in weights.items()
    )


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "folder", WEIGHTS)
    assert _same(OffloadedWeightsLoader(save_folder=tmp_path / "folder"), WEIGHTS)
    assert len(list((tmp_path / "folder").iterdir())) == 2, "the index, and one file for all"


def test_memory_comes_before_disk(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, WEIGHTS)
    loader = OffloadedWeightsLoader(state_dict={"scalar": torch.tensor(8)}, save_folder=tmp_path)
    assert int(loader["scalar"]) == 8
    assert len(loader) == len(WEIGHTS)
    assert "a.bias" in loader
    assert "b" not in loader


def test_later_weights_replace_those_of_their_name_and_leave_the_others(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, WEIGHTS)
    offload_state_dict(tmp_path, {"scalar": torch.tensor(9)})
    assert _same(OffloadedWeightsLoader(save_folder=tmp_path), {**WEIGHTS, "scalar": torch.tensor(9)})
    offload_state_dict(tmp_path, WEIGHTS)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1, "files that nothing names are removed"


def test_a_loader_gets_its_weights_or_none_after_later_ones_replaced_them(tmp_path: Path) -> None:
    loaders = []
    for value in (1.0, 2.0, 3.0):
        offload_state_dict(tmp_path, {"w": torch.tensor([value])})
        loaders.append(OffloadedWeightsLoader(save_folder=tmp_path))
        assert loaders[-1]["w"].item() == value
    for replaced in loaders[:2]:
        with pytest.raises(CheckpointError, match="is missing"):
            replaced["w"]
    assert loaders[2]["w"].item() == 3


@pytest.mark.dist
def test_several_processes_offload_one_model_to_one_folder(tmp_path: Path) -> None:
    assert on_ranks(2, offload_often, str(tmp_path)) == [True, True]


def offload_often(folder: str) -> bool:
    weights = {f"w{i}": torch.full((1000,), float(i)) for i in range(4)}
    loaders = []
    for _ in range(10):
        offload_state_dict(folder, weights)
        loaders.append(OffloadedWeightsLoader(save_folder=folder))
    return all(_same(loader, weights) for loader in loaders)


def test_one_weight_at_a_time_and_the_index_after(tmp_path: Path) -> None:
    index = offload_weight(WEIGHTS["a.weight"], "a.weight", tmp_path)
    index = offload_weight(WEIGHTS["scalar"], "scalar", tmp_path, index)
    save_offload_index(index, tmp_path)
    save_offload_index({}, tmp_path)
    assert _same(
        OffloadedWeightsLoader(save_folder=tmp_path), {name: WEIGHTS[name] for name in ("a.weight", "scalar")}
    )


def test_an_index_of_transformers_is_read(tmp_path: Path) -> None:
    index: dict = {}
    for name, tensor in WEIGHTS.items():
        transformers_reference.offload_weight(tensor, name, str(tmp_path), index)
    assert _same(OffloadedWeightsLoader(index=index), WEIGHTS)


def test_our_folder_is_read_by_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offload_state_dict(tmp_path, WEIGHTS)
    monkeypatch.chdir(tmp_path)  # the reference takes file names as they are
    theirs = accelerate.utils.OffloadedWeightsLoader(save_folder=tmp_path)
    assert torch.equal(theirs["a.weight"], WEIGHTS["a.weight"])


def test_raw_files_of_the_reference_are_refused(tmp_path: Path) -> None:
    accelerate.utils.offload_state_dict(tmp_path, {"w": torch.rand(2)})
    with pytest.raises(CheckpointError, match=r"\.dat files.* are not read"):
        read_offload_index(tmp_path)


@pytest.mark.parametrize("index", [[], {"w": 3}, {"w": {"safetensors_file": 3}}])
def test_a_malformed_index(tmp_path: Path, index: object) -> None:
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        read_offload_index(tmp_path)


def test_a_file_without_the_tensor(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.rand(2)})
    index = read_offload_index(tmp_path)
    index["v"] = {**index["w"], "weight_name": "v"}
    with pytest.raises(CheckpointError, match="no tensor 'v'"):
        OffloadedWeightsLoader(save_folder=tmp_path, index=index)["v"]


def test_nothing_given() -> None:
    with pytest.raises(ConfigError, match="save_folder"):
        OffloadedWeightsLoader()


def test_a_dtype_other_than_the_files(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.rand(2)})
    index = read_offload_index(tmp_path)
    index["w"]["dtype"] = "float16"
    assert OffloadedWeightsLoader(save_folder=tmp_path, index=index)["w"].dtype == torch.float16


class _Failing(dict[str, torch.Tensor]):
    """Weights of which one can be read, before memory runs out."""

    reads = 0

    def __getitem__(self, key: str) -> torch.Tensor:
        self.reads += 1
        if self.reads > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__getitem__(key)


def test_a_load_that_fails_leaves_no_weights_on_the_device() -> None:
    layer = nn.Linear(2, 2)
    weights = _Failing(layer.state_dict())
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    with pytest.raises(torch.OutOfMemoryError):
        layer(torch.ones(1, 2))
    assert weights.reads == 2
    assert layer.weight.is_meta
    assert layer.bias.is_meta
