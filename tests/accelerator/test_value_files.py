"""Single files of scripts: what is written under each name, and read under the same."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from windlass import Accelerator
from windlass.accelerator.value_files import load_values, save_values
from windlass.core.errors import CheckpointError
from windlass.utils import load, save


def test_a_file_of_tensors_names_the_format_that_transformers_asks_for(tmp_path: Path) -> None:
    save_values(tmp_path / "a.safetensors", {"a": torch.ones(1)})
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_script_reads_what_it_saved_with_torch_load(tmp_path: Path) -> None:
    """A checkpoint of a public loop: it looks for the name that it gave, and opens the file with `torch.load`."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter": 7, "best": [0.5, None]}
    path = tmp_path / "new" / "end.pt"
    for _ in range(2):
        Accelerator(cpu=True).save(whole, path)
    assert [found.name for found in path.parent.iterdir()] == ["end.pt"]
    for found in (torch.load(path, weights_only=True), load(path), load(path, "cpu")):
        assert (found["iter"], found["best"]) == (7, [0.5, None])
        model.load_state_dict(found["model"])
        torch.optim.AdamW(model.parameters()).load_state_dict(found["optimizer"])
        assert torch.equal(
            found["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
        )


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("tied", model.weight.data)
    save(model.state_dict(), tmp_path / "pytorch_model.bin")
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert found["tied"].data_ptr() == found["weight"].data_ptr()
    assert torch.equal(load(tmp_path / "pytorch_model.bin")["tied"], model.weight)


def test_safe_serialization_writes_safetensors_under_any_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    Accelerator(cpu=True).save(model.state_dict(), tmp_path / "a.bin", safe_serialization=True)
    save(model.state_dict(), tmp_path / "b.bin", safe_serialization=True)
    for name in ("a.bin", "b.bin"):
        assert torch.equal(load_file(tmp_path / name)["weight"], model.weight)


def test_states_of_generators_come_back(tmp_path: Path) -> None:
    """They are arrays of numpy and tuples, and `torch.load` reads them with `weights_only=False` alone."""
    state = {
        "numpy": np.random.RandomState(5).get_state(),
        "python": random.Random(6).getstate(),
        "none": b"",
    }
    save(state, tmp_path / "random.pkl")
    found = load(tmp_path / "random.pkl")
    generator, expected = np.random.RandomState(0), np.random.RandomState(5)
    generator.set_state(found["numpy"])
    assert generator.rand() == expected.rand()
    assert (found["python"], found["none"]) == (state["python"], b"")
    assert torch.load(tmp_path / "random.pkl", weights_only=False)["python"] == state["python"]


def test_pairs_of_earlier_versions_are_read(tmp_path: Path) -> None:
    save_values(tmp_path / "end.pt.json", {"step": 1, "weight": torch.ones(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end.pt.json", "end.pt.safetensors"]
    assert torch.equal(load(tmp_path / "end.pt")["weight"], torch.ones(2))
    save({"step": 2}, tmp_path / "end.pt")  # is newer
    assert load(tmp_path / "end.pt") == {"step": 2}
    with pytest.raises(CheckpointError, match=r"neither .*missing\.pt nor missing\.pt\.json"):
        load(tmp_path / "missing.pt")


@pytest.mark.parametrize("name", ["notes.json", "notes.pkl", "notes"])
def test_values_need_no_tensors(tmp_path: Path, name: str) -> None:
    save_values(tmp_path / name, [1, "two"])
    assert load(tmp_path / name) == [1, "two"]
    assert len(list(tmp_path.iterdir())) == 1


class Settings(dict[str, int]):
    """A map that a file of torch.save would name as a class of this module."""


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    save_values(tmp_path / "end.pt", {"epoch": 1})
    for name in ("end.pt", "end.json"):
        with pytest.raises(
            CheckpointError, match=rf"{name} is not written: state 'args' is a argparse\.Namespace"
        ):
            save_values(tmp_path / name, {"args": Namespace(lr=1.0)})
    with pytest.raises(CheckpointError, match=r"would hold a .*test_value_files\.Settings"):
        save_values(tmp_path / "end.pt", {"args": Settings(lr=1)})
    with pytest.raises(CheckpointError, match="holds a dict of tensors"):
        save_values(tmp_path / "end.safetensors", {"epoch": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["end.pt"]
    assert load(tmp_path / "end.pt") == {"epoch": 1}


def test_tensors_of_another_save_are_not_replaced(tmp_path: Path) -> None:
    save({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.json is not written: .* replace model\.safetensors"):
        save({"best": torch.zeros(1)}, tmp_path / "model.json")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(load(tmp_path / "model.safetensors")["weight"], torch.ones(2))
    save({"best": 0.5}, tmp_path / "model.json")
    for best in (torch.zeros(1), torch.ones(1)):
        save({"best": best}, tmp_path / "best.json")
        assert torch.equal(load(tmp_path / "best.json")["best"], best)


def test_files_of_others_are_read_and_not_run(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "end.pt")
    assert torch.equal(load(tmp_path / "end.pt")["a"], torch.ones(2))
    torch.save({"a": Namespace()}, tmp_path / "end.pt")
    with pytest.raises(CheckpointError, match=r"argparse\.Namespace"):
        load(tmp_path / "end.pt")


class Interrupted(BaseException):
    """What a kill between two steps of a save would be."""


@pytest.mark.parametrize("at", range(4))
def test_a_save_that_is_interrupted_mixes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    path, states = tmp_path / "end.json", [{"step": n, "weight": torch.full((2,), float(n))} for n in (1, 2)]
    save_values(path, states[0])
    renames, replace = 0, os.replace

    def interrupted(*args: object) -> None:
        nonlocal renames
        renames += 1
        if renames == at:
            raise Interrupted
        replace(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", interrupted)
    with contextlib.suppress(Interrupted):
        save_values(path, states[1])
    monkeypatch.undo()
    if renames == at == 2:  # between the two
        with pytest.raises(CheckpointError, match="are of two saves"):
            load_values(path)
        return
    found = load_values(path)
    assert torch.equal(found["weight"], torch.full((2,), float(found["step"])))


def test_values_without_tensors_replace_those_with_tensors(tmp_path: Path) -> None:
    save_values(tmp_path / "end.json", {"step": 1, "weight": torch.ones(2)})
    save_values(tmp_path / "end.json", {"step": 2})
    assert load_values(tmp_path / "end.json") == {"step": 2}


def test_a_file_of_torch_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_values(tmp_path / "end.pt", {"step": 1})

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_values(tmp_path / "end.pt", {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["end.pt"]
    assert load(tmp_path / "end.pt") == {"step": 1}
