"""`windlass checkpoint diff` in words: short, also if much differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from windlass.checkpoint.adapters import ADAPTER_WEIGHTS
from windlass.checkpoint.content import Content
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.sharded import parts_of_rank
from windlass.checkpoint.store import Store
from windlass.checkpoint.weights import WEIGHTS_NAME
from windlass.cli.main import main
from windlass.dist.gang import Gang


def save(root: Path, step: int, weights: dict[str, torch.Tensor], rows: int) -> str:
    history = [{"step": row, "loss": 1.0, "epoch": 0.5} for row in range(rows)]
    state = {"global_step": step, "epoch": step / 2, "log_history": history}
    content = Content(shared={"trainer_state": state}, per_rank={}, weights={WEIGHTS_NAME: weights}, files={})
    path = CheckpointManager(Store(root)).save(step, content, meta={})
    assert path is not None
    return str(path)


@pytest.mark.parametrize("many", [3, 8])
def test_many_tensors_and_rows_are_counted(
    many: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {f"layer.{index}": torch.zeros(4) for index in range(many)}
    after = {name: value + 0.25 for name, value in before.items()} | {"layer.1": torch.full((4,), 1.5)}
    paths = save(tmp_path, 1, before, rows=1), save(tmp_path, 2, {**after, "new": torch.ones(1)}, rows=5)
    assert main(["checkpoint", "diff", *paths]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "model: new: added" in lines
    assert "trainer_state.json: global_step: 1 became 2" in lines
    assert "trainer_state.json: log_history: different in 4 of its rows" in lines
    if many > 5:
        assert f"model: {many} tensors differ, most of all layer.1: max abs difference 1.5" in lines
    else:
        assert "model: layer.2: max abs difference 0.25" in lines
    assert lines[-1].startswith(f"{many + 1 + 2 + 12} differences (--json lists them); ")
    assert main(["checkpoint", "diff", *paths, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["differences"]
    assert len(found) == many + 1 + 2 + 12
    assert [one["largest"] for one in found if one["name"] == "layer.1"] == [1.5]


def test_a_tensor_that_is_not_a_number_differs_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {f"layer.{index}": torch.zeros(4) for index in range(9)}
    after = {name: value + 9 for name, value in before.items()} | {"layer.3": torch.full((4,), float("nan"))}
    assert main(["checkpoint", "diff", save(tmp_path, 1, before, 0), save(tmp_path, 2, after, 0)]) == 1
    assert "most of all layer.3: max abs difference nan" in capsys.readouterr().out


def test_imaginary_parts_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [save(tmp_path, step, {"layer": torch.tensor([1 + 3j * step])}, 0) for step in (1, 2)]
    assert main(["checkpoint", "diff", *paths]) == 1
    assert "layer: max abs difference 3" in capsys.readouterr().out


def test_every_model_and_optimizer_that_ranks_wrote_in_parts_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for step in (1, 2):
        parts = [
            parts_of_rank(stem, {"layer": torch.full((2,), value)}, Gang())
            for stem, value in (("model", 1.0), ("model_1", float(step)), ("optimizer_0", float(step)))
        ]
        paths.append(CheckpointManager(Store(tmp_path)).save(step, Content(parts=parts), meta={}))
    assert main(["checkpoint", "diff", *map(str, paths)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {"model_1: layer: max abs difference 1", "optimizer_0: layer: max abs difference 1"} < {*lines}
    assert lines[-1].startswith("2 differences")


def test_an_adapter_beside_whole_weights_is_compared_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / name for name in ("before", "after")]
    for path, value in zip(paths, (1.0, 2.0), strict=True):
        path.mkdir()
        save_file({"layer": torch.zeros(1)}, path / WEIGHTS_NAME)
        save_file({"layer": torch.tensor([value])}, path / ADAPTER_WEIGHTS)
    assert main(["checkpoint", "diff", *map(str, paths)]) == 1
    assert f"{ADAPTER_WEIGHTS}: layer: max abs difference 1" in capsys.readouterr().out


def test_values_are_told_apart_by_all_keys_on_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a configuration of transformers, which may hold infinities."""
    paths = [tmp_path / name for name in ("before", "after")]
    for path, value in zip(paths, (1, 2), strict=True):
        path.mkdir()
        save_file({"layer": torch.zeros(1)}, path / WEIGHTS_NAME)
        config = {"a/b": value, "a": {"b": 3}, "time_step_limit": [0.0, float("inf")]}
        (path / "config.json").write_text(json.dumps(config))
    assert main(["checkpoint", "diff", *map(str, paths)]) == 1
    assert "config.json: a/b: 1 became 2" in capsys.readouterr().out


def test_a_row_or_two_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"layer": torch.zeros(1)}
    assert main(["checkpoint", "diff", save(tmp_path, 1, weights, 1), save(tmp_path, 2, weights, 2)]) == 1
    assert "trainer_state.json: log_history/1/loss: added" in capsys.readouterr().out
