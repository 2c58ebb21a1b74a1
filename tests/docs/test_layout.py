"""The page on checkpoints says enough to write a reader, and `plain_reader.py` is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.dist.launch import on_ranks
from tests.docs.plain_reader import PlainReader
from tests.laws.source import ROOT
from tests.trainer.background_cases import trainer_of
from torch import Tensor

PAGE = (ROOT / "docs" / "checkpoints.md").read_text("utf-8")


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_page_lets_a_stranger_read_a_whole_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=4)
    trainer.train()
    checkpoint = PlainReader(tmp_path / "checkpoint-4")
    assert_same(checkpoint.weights(), trainer.model.state_dict())
    optimizer = checkpoint.state("optimizer")
    by_id = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    for parameter, state in trainer.optimizer.state.items():
        assert_same(optimizer["state"][by_id[id(parameter)]], state)
    assert checkpoint.state("schedule") == {"step": 4}
    assert checkpoint.state("loop")["updates_in_epoch"] == 4
    assert checkpoint.state("trainer_state")["global_step"] == 4
    assert set(checkpoint.state("rank-00000")) == {"rng", "ledger", "position", "buffers"}


def test_the_page_names_every_part_of_a_checkpoint(tmp_path: Path) -> None:
    trainer_of(tmp_path, max_steps=2).train()
    checkpoint = PlainReader(tmp_path / "checkpoint-2")
    unnamed = [
        name
        for name in [
            *checkpoint.manifest["files"],
            *checkpoint.state("rank-00000"),
            *checkpoint.state("loop"),
        ]
        if name not in PAGE
    ]
    assert not unnamed


@pytest.mark.dist
def test_the_page_lets_a_stranger_read_the_parts_of_ranks(tmp_path: Path) -> None:
    on_ranks(2, main, tmp_path)
    checkpoint = PlainReader(tmp_path / "checkpoint-4")
    assert checkpoint.manifest["world_size"] == 2
    weights = checkpoint.weights()
    assert_same(weights, load_file(tmp_path / "model.safetensors"))
    optimizer = checkpoint.state("optimizer")
    assert optimizer["state"].keys() == weights.keys()
    for name, state in optimizer["state"].items():
        assert state["exp_avg"].shape == weights[name].shape
        assert torch.count_nonzero(state["exp_avg_sq"])
    assert checkpoint.has("rank-00001.json")


# --- what each rank runs ----------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    trainer = trainer_of(folder, max_steps=4, fsdp="full_shard")
    trainer.train()
    trainer.save_model()
