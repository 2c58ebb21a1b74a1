"""Checkpoints into models, tensor by tensor."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import load_checkpoint_and_dispatch as peer_load_and_dispatch
from accelerate.utils import load_state_dict as peer_load
from safetensors.torch import save_file
from tests.compat.big_models import IDS, Model, seeded
from torch import nn

from windlass.checkpoint.split import save_split
from windlass.checkpoint.weights import save_weights
from windlass.compat.big_models.big_model import init_empty_weights, load_checkpoint_and_dispatch
from windlass.compat.big_models.checkpoint_loading import (
    find_checkpoint,
    load_checkpoint_in_model,
    load_state_dict,
)
from windlass.compat.big_models.offloaded import OffloadedWeightsLoader, read_offload_index
from windlass.core.errors import CheckpointError, ConfigError


@pytest.fixture(autouse=True)
def _propagate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("windlass"), "propagate", True)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of `seeded()`, the tied head stored under the embedding's name."""
    save_weights(tmp_path, seeded().state_dict())
    return tmp_path


def _empty(**sizes: bool) -> Model:
    torch.manual_seed(1)
    with init_empty_weights():
        model = Model(**sizes).eval()
    return _with_factors(model)


def _with_factors(model: Model) -> Model:
    """Buffers outside the state dict are the constructor's to make; here they are random, and so they are copied."""
    for block, full in zip(model.blocks, seeded().blocks, strict=True):
        block.factor.copy_(full.factor)
    return model


def _shards(folder: Path) -> Path:
    state = {name: tensor.contiguous() for name, tensor in seeded(tied=False).state_dict().items()}
    names = sorted(state)
    where = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(where.values()):
        save_file(
            {name: state[name] for name in names if where[name] == file}, folder / file, {"format": "pt"}
        )
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


@pytest.mark.parametrize("spelling", ["folder", "file"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_an_empty_model_is_filled(saved: Path, spelling: str, device_map: dict | None) -> None:
    model = _empty()
    path = saved if spelling == "folder" else saved / "model.safetensors"
    load_checkpoint_in_model(model, path, device_map=device_map, strict=True)
    assert torch.equal(model(IDS), seeded()(IDS))
    assert model.head.weight is model.embedding.weight


def test_shards_by_folder_and_by_index(tmp_path: Path) -> None:
    index = _shards(tmp_path)
    for path in (tmp_path, index, str(index)):
        model = _empty(tied=False)
        load_checkpoint_in_model(model, path, strict=True)
        assert torch.equal(model(IDS), seeded(tied=False)(IDS))


def test_a_snapshot_in_the_hubs_cache_is_loaded(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1f", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    _shards(snapshot)
    for number, path in enumerate(list(snapshot.iterdir())):
        path.rename(blobs / f"{number}")
        path.symlink_to(f"../../blobs/{number}")
    models = _empty(tied=False), _empty(tied=False)
    load_checkpoint_in_model(models[0], snapshot, strict=True)
    places = {"blocks": "disk", "": "cpu"}
    load_checkpoint_and_dispatch(models[1], snapshot, device_map=places, offload_folder=tmp_path / "offload")
    for model in models:
        assert torch.equal(model(IDS), seeded(tied=False)(IDS))


def test_ties_that_the_model_does_not_have_are_filled_twice(saved: Path, tmp_path: Path) -> None:
    save_split(tmp_path / "split", seeded().state_dict(), limit=1000)
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 1
    for folder in (saved, tmp_path / "split"):
        model = _empty(tied=False)
        load_checkpoint_in_model(model, folder, strict=True)
        assert model.head.weight is not model.embedding.weight
        assert torch.equal(model(IDS), seeded()(IDS))


def test_tensors_that_are_there_are_filled_in_place(saved: Path) -> None:
    model = _with_factors(seeded(5))
    before = dict(model.named_parameters())
    load_checkpoint_in_model(model, saved, strict=True)
    assert all(param is before[name] for name, param in model.named_parameters())
    assert torch.equal(model(IDS), seeded()(IDS))


def test_casts_what_is_a_fraction_and_keeps_what_was_named(saved: Path) -> None:
    model = _empty()
    load_checkpoint_in_model(model, saved, dtype="bfloat16", keep_in_fp32_modules=["norm", "position"])
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert dtypes["norm.num_batches_tracked"] == torch.int64
    assert dtypes["norm.weight"] == dtypes["position"] == torch.float32
    assert dtypes["head.weight"] == dtypes["blocks.0.shift"] == torch.bfloat16


def test_weights_on_disk_stay_in_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    model, folder = _empty(), tmp_path / "offload"
    places = {"": "cpu", "blocks": "disk", "embedding": "disk", "head": "disk"}
    load_checkpoint_in_model(model, saved, device_map=places, offload_folder=folder, dtype=torch.float16)
    assert [path.name for path in folder.iterdir()] == ["index.json"], "nothing is copied"
    assert model.blocks[0].scale.is_meta
    assert model.blocks[0].scale.dtype == torch.float16
    assert not model.blocks[0].shift.is_meta, "buffers are needed in memory unless they are offloaded too"
    assert model.head.weight is model.embedding.weight
    loader = OffloadedWeightsLoader(save_folder=folder)
    full = seeded().state_dict()
    assert torch.equal(loader["head.weight"], full["head.weight"].half())
    assert "blocks.1.shift" not in loader
    load_checkpoint_in_model(_empty(), saved, device_map=places, offload_folder=folder, offload_buffers=True)
    assert "blocks.1.shift" in read_offload_index(folder)


def test_ties_over_places_are_filled_each(saved: Path, tmp_path: Path) -> None:
    model = _empty()
    places = {"": "cpu", "head": "disk"}
    load_checkpoint_in_model(model, saved, device_map=places, offload_folder=tmp_path / "offload")
    assert model.head.weight.is_meta
    assert not model.embedding.weight.is_meta
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "offload")
    assert torch.equal(loader["head.weight"], model.embedding.weight)


def test_what_does_not_match_is_said_and_strictly_refused(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(11, 8), "other": nn.Linear(1, 1)})
    load_checkpoint_in_model(model, saved)
    assert torch.equal(model["embedding"].weight, seeded().embedding.weight)
    assert "2 weights of the model are not in it: other.weight, other.bias" in caplog.text
    assert "are not in the model" in caplog.text
    with pytest.raises(CheckpointError, match=r"(?s)other\.weight.*norm\.bias|not in the model"):
        load_checkpoint_in_model(model, saved, strict=True)


def test_another_shape_is_named(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"norm\.\w+ has shape \[8\], in the model it has \[9\]"):
        load_checkpoint_in_model(nn.ModuleDict({"norm": nn.BatchNorm1d(9)}), saved)


def test_ties_that_are_apart_in_the_file(tmp_path: Path) -> None:
    save_weights(tmp_path, seeded(tied=False).state_dict())
    with pytest.raises(CheckpointError, match=r"(head|embedding)\.weight differ, and the model ties them"):
        load_checkpoint_in_model(seeded(), tmp_path)


def _pickled(folder: Path, how: str) -> Path:
    """A checkpoint of `torch.save`: the folder, file or index to load."""
    full = {name: tensor.clone() for name, tensor in seeded(tied=False).state_dict().items()}
    folder.mkdir()
    if how != "shards":
        torch.save(full, folder / how)
        return folder if how == "pytorch_model.bin" else folder / how
    names = sorted(full)
    where = {name: f"pytorch_model-0000{1 + (i > 5)}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(where.values()):
        torch.save({name: full[name] for name in names if where[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.mark.parametrize("how", ["pytorch_model.bin", "model.pt", "weights.ckpt", "shards"])
@pytest.mark.parametrize("places", [None, {"": "cpu"}], ids=str)
def test_files_of_torch_save_are_loaded_as_by_the_peer(tmp_path: Path, how: str, places: Any) -> None:
    checkpoint, outputs = _pickled(tmp_path / "saved", how), []
    for load in (load_checkpoint_and_dispatch, peer_load_and_dispatch):
        model = _empty(tied=False) if places else _with_factors(seeded(5, tied=False))
        outputs.append(load(model, str(checkpoint), device_map=places)(IDS))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], seeded(tied=False)(IDS))


@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_a_file_of_torch_save_are_copied_to_disk(tmp_path: Path, tied: bool) -> None:
    torch.save(seeded(tied=tied).state_dict(), tmp_path / "pytorch_model.bin")
    places, folder = {"": "cpu", "blocks": "disk", "head": "disk"}, tmp_path / "offload"
    model = load_checkpoint_and_dispatch(
        _empty(tied=tied), tmp_path, device_map=places, offload_folder=folder, strict=True
    )
    assert model.blocks[0].scale.is_meta
    assert model.head.weight.is_meta
    (tmp_path / "pytorch_model.bin").unlink()
    assert torch.equal(model(IDS), seeded(tied=tied)(IDS))


def test_safetensors_come_before_a_pickle_beside_them(saved: Path) -> None:
    torch.save({"other": torch.ones(1)}, saved / "pytorch_model.bin")
    model = _empty()
    load_checkpoint_in_model(model, saved, strict=True)
    assert torch.equal(model(IDS), seeded()(IDS))


def test_nothing_in_a_file_of_torch_save_is_executed(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "run": os.getcwd}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_checkpoint_in_model(nn.Identity(), tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/model.safetensors", ".."])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="does not lie in its folder"):
        load_checkpoint_in_model(nn.Identity(), tmp_path)


def test_odd_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        find_checkpoint(tmp_path / "nothing")
    with pytest.raises(
        CheckpointError, match=r"neither model\.safetensors nor pytorch_model\.bin nor an index"
    ):
        find_checkpoint(tmp_path)
    (tmp_path / "a.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index"):
        load_checkpoint_in_model(nn.Identity(), tmp_path)
    (tmp_path / "b.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="several indices"):
        find_checkpoint(tmp_path)


def test_a_shard_of_another_checkpoint(tmp_path: Path) -> None:
    index = _shards(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors lacks what"):
        load_checkpoint_in_model(_empty(tied=False), index)


def test_weights_of_another_framework(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "flax"})
    with pytest.raises(CheckpointError, match="flax"):
        load_checkpoint_in_model(nn.Identity(), tmp_path)


def test_all_that_cannot_be_honoured_at_once(saved: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_checkpoint_in_model(
            seeded(),
            saved,
            {"": "disk"},
            offload_8bit_bnb=True,
            full_state_dict=False,
            broadcast_from_rank0=True,
        )
    assert [problem.field for problem in caught.value.problems] == [
        "offload_folder", "offload_8bit_bnb", "full_state_dict", "broadcast_from_rank0",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "places", [None, {"": "cpu"}, {"a": "cpu", "b": "meta"}, {"a": "disk", "b": "cpu"}], ids=str
)
def test_the_tensors_of_one_file_are_those_of_the_peer(tmp_path: Path, name: str, places: Any) -> None:
    state, path = {"a.weight": torch.randn(3), "b.weight": torch.ones(2, 2)}, tmp_path / name
    if path.suffix == ".bin":
        torch.save(state, path)
    else:
        save_file(state, path, {"format": "pt"})
    found = load_state_dict(path, places)
    assert {n: t.device.type for n, t in found.items()} == {
        "a.weight": "cpu", "b.weight": "meta" if places and places.get("b") == "meta" else "cpu"
    }  # fmt: skip
    if not places or "meta" not in places.values():
        theirs = peer_load(str(path), None if path.suffix == ".bin" else places)
        assert all(torch.equal(found[n], theirs[n]) for n in state)


def test_a_file_of_another_library_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "tf"})
    with pytest.raises(CheckpointError, match="written for 'tf'"):
        load_state_dict(tmp_path / "model.safetensors")
