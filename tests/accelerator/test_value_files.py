"""Single files of scripts: what is written under each name, and read under the same."""

from __future__ import annotations

import contextlib
import logging
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from windlass import Accelerator
from windlass.accelerator.value_files import load_values, save_values
from windlass.core.errors import CheckpointError
from windlass.utils import load, save


def test_what_scripts_save_as_pickle_is_kept_beside_that_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of a public loop: refused, it would cost the weights of the whole run."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter": 7, "best": [0.5, None]}
    for _ in range(2):
        Accelerator(cpu=True).save(whole, tmp_path / "new" / "end.pt")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["end.pt.json", "end.pt.safetensors"]
    warned = [
        row for row in caplog.records if row.levelno == logging.WARNING and "end.pt.json" in row.message
    ]
    assert len(warned) == 1
    found = load(tmp_path / "new" / "end.pt")
    assert (found["iter"], found["best"]) == (7, [0.5, None])
    model.load_state_dict(found["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(found["optimizer"])
    assert torch.equal(
        found["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_a_state_dict_is_a_file_that_others_read_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("tied", model.weight.data)
    save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for found in (
        load_file(tmp_path / "pytorch_model.bin.safetensors"),
        load(tmp_path / "pytorch_model.bin", "cpu"),
    ):
        assert found.keys() == model.state_dict().keys()
        assert torch.equal(found["tied"], model.weight)


@pytest.mark.parametrize("name", ["notes.json", "notes.pkl", "notes"])
def test_values_need_no_tensors(tmp_path: Path, name: str) -> None:
    save_values(tmp_path / name, [1, "two"])
    assert load_values(tmp_path / name) == [1, "two"]
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'args' is a argparse\.Namespace"):
        save_values(tmp_path / "end.pt", {"args": Namespace(lr=1.0)})
    with pytest.raises(CheckpointError, match="holds a dict of tensors"):
        save_values(tmp_path / "end.safetensors", {"epoch": 1})
    assert not list(tmp_path.iterdir())


def test_files_of_others_are_not_unpickled(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "end.pt")
    with pytest.raises(CheckpointError, match=r"there is no end\.pt\.json.*can run any code"):
        load(tmp_path / "end.pt")


class Interrupted(BaseException):
    """What a kill between two steps of a save would be."""


@pytest.mark.parametrize("at", range(4))
def test_a_save_that_is_interrupted_mixes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    path, states = tmp_path / "end.pt", [{"step": n, "weight": torch.full((2,), float(n))} for n in (1, 2)]
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
    save_values(tmp_path / "end.pt", {"step": 1, "weight": torch.ones(2)})
    save_values(tmp_path / "end.pt", {"step": 2})
    assert load_values(tmp_path / "end.pt") == {"step": 2}
