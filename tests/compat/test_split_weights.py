from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import trainer_utils as reference

from windlass.compat.split_weights import MisfitError, load_sharded_checkpoint
from windlass.core.errors import CheckpointError


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def write(folder: Path, state: dict[str, Any], safe: bool = True) -> None:
    """The state in two files with an index."""
    names, files = sorted(state), ("one", "two")
    ending, stem = ("safetensors", "model") if safe else ("bin", "pytorch_model")
    placed = {name: f"{stem}-{files[i % 2]}.{ending}" for i, name in enumerate(names)}
    for file in set(placed.values()):
        part = {name: state[name].contiguous() for name in names if placed[name] == file}
        save_file(part, folder / file) if safe else torch.save(part, folder / file)
    index = {"metadata": {}, "weight_map": placed}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("safe", [True, False])
def test_weights_in_several_files_are_loaded(tmp_path: Path, safe: bool) -> None:
    source, ours, theirs = model(), model(), model()
    write(tmp_path, source.state_dict(), safe)
    save_file(model().state_dict(), tmp_path / "model.safetensors")  # of an earlier save
    found = load_sharded_checkpoint(ours, str(tmp_path))
    wanted = reference.load_sharded_checkpoint(theirs, str(tmp_path))
    assert (
        (found.missing_keys, found.unexpected_keys)
        == (wanted.missing_keys, wanted.unexpected_keys)
        == ([], [])
    )
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)


def test_weights_on_the_meta_device_are_refused(tmp_path: Path) -> None:
    write(tmp_path, model().state_dict())
    with torch.device("meta"):
        empty = model()
    with pytest.raises(MisfitError, match=r"on the meta device.*0\.weight.*load_checkpoint_in_model"):
        load_sharded_checkpoint(empty, tmp_path)


def test_names_that_do_not_match_are_an_error_or_named(tmp_path: Path) -> None:
    state = model().state_dict()
    state["other"] = state.pop("1.bias")
    write(tmp_path, state)
    ours, theirs = model(), model()
    with pytest.raises(MisfitError, match=r"1 missing in the files: 1\.bias; 1 unknown to the model: other"):
        load_sharded_checkpoint(ours, tmp_path)
    assert issubclass(MisfitError, RuntimeError)
    found = load_sharded_checkpoint(ours, tmp_path, strict=False)
    wanted = reference.load_sharded_checkpoint(theirs, str(tmp_path), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (wanted.missing_keys, wanted.unexpected_keys)
    assert torch.equal(ours[0].weight, state["0.weight"])


def test_other_shapes_and_missing_indexes_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no index"):
        load_sharded_checkpoint(model(), tmp_path)
    write(tmp_path, {**model().state_dict(), "1.bias": torch.zeros(4)})
    with pytest.raises(MisfitError, match=r"another shape: 1\.bias"):
        load_sharded_checkpoint(model(), tmp_path)
