from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.small import arguments, rows
from tests.zero import loop_ranks, runs
from tests.zero.needed import needs_deepspeed

from windlass import Trainer
from windlass.core.errors import ConfigError, ModelError
from windlass.zero.flat_optimizer import ZeroOptimizer
from windlass.zero.library import Place

TOLERANCE = 5e-6  # of fp32

pytestmark = [
    pytest.mark.dist,
    needs_deepspeed,
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process without DeepSpeed."""
    folder = tmp_path_factory.mktemp("alone")
    return {**runs.trained(folder, stage=-1), "weights": weights(folder)}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def check(found: dict[str, Any], folder: Path, alone: dict[str, Any]) -> None:
    for key, values in found.items():
        assert values == pytest.approx(alone[key], abs=TOLERANCE), key
    saved = weights(folder)
    assert saved.keys() == alone["weights"].keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, alone["weights"][name], rtol=0, atol=TOLERANCE)


def test_stage_1_on_two_ranks_equals_one_process(alone: dict[str, Any], tmp_path: Path) -> None:
    compiled = tmp_path / "compiled"
    environ = {"TORCH_EXTENSIONS_DIR": str(compiled)}
    found, _ = on_ranks(2, runs.trained, tmp_path / "run", 1, environ=environ)
    check(found, tmp_path / "run", alone)
    assert not compiled.exists(), "nothing is compiled, so a killed process leaves no lock of it"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_other_stages_equal_one_process(stage: int, alone: dict[str, Any], tmp_path: Path) -> None:
    found, _ = on_ranks(2, runs.trained, tmp_path, stage)
    check(found, tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_job_of_one_process(stage: int, alone: dict[str, Any], tmp_path: Path) -> None:
    [found] = on_ranks(1, runs.trained, tmp_path, stage)
    check(found, tmp_path, alone)


@pytest.mark.parametrize("stage", [1, 3])
def test_groups_without_trained_parameters_keep_their_places(stage: int, tmp_path: Path) -> None:
    """The engine leaves them out: the rates of a schedule would reach the groups behind them."""
    [alone] = on_ranks(0, loop_ranks.grouped, -1, tmp_path / "alone")
    [found] = on_ranks(1, loop_ranks.grouped, stage, tmp_path / "run")
    assert found["rates"] == alone["rates"]
    for name, values in alone["weights"].items():
        assert found["weights"][name] == pytest.approx(values, abs=TOLERANCE), name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_second_train_of_a_trainer_equals_that_of_one_process(stage: int, tmp_path: Path) -> None:
    [alone] = on_ranks(0, runs.twice, tmp_path / "alone", -1)
    found, _ = on_ranks(2, runs.twice, tmp_path / "run", stage)
    check(found, tmp_path / "run", {**alone, "weights": weights(tmp_path / "alone")})


def test_parameters_without_dimensions_are_refused_by_name(tmp_path: Path) -> None:
    model = runs.Net()
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    args = arguments(tmp_path, **runs.config(1))
    with pytest.raises(
        ModelError, match=r"parameters without dimensions.*: scale\. Give them the shape \[1\]"
    ):
        Trainer(model, args, train_dataset=rows(8)).train()


def test_complex_parameters_are_refused_by_name(tmp_path: Path) -> None:
    model = runs.Net()
    model.wave = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    args = arguments(tmp_path, **runs.config(3))
    with pytest.raises(
        ModelError, match="complex parameters, which DeepSpeed cannot join with real ones: wave"
    ):
        Trainer(model, args, train_dataset=rows(8)).train()


def test_parameters_of_several_dtypes_are_refused_at_stage_3(tmp_path: Path) -> None:
    model = runs.Net()
    model.few = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ModelError, match=r"several dtypes \(torch\.bfloat16, torch\.float32\)"):
        Trainer(model, arguments(tmp_path, **runs.config(3)), train_dataset=rows(8)).train()


def test_parameters_that_are_unfrozen_in_a_run_are_refused(tmp_path: Path) -> None:
    [errors] = on_ranks(1, runs.unfreezing, tmp_path)
    assert ["frozen when the run began" in error for error in errors] == [True, True]


def test_embeddings_that_rewrite_their_rows_are_refused_by_name(tmp_path: Path) -> None:
    model = runs.Net()
    model.table = torch.nn.Embedding(3, 2, max_norm=1.0)
    with pytest.raises(ConfigError, match=r"model\.table\.max_norm=1\.0: rewrites the rows"):
        Trainer(model, arguments(tmp_path, **runs.config(1)), train_dataset=rows(8)).train()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"optim": "galore_adamw_layerwise", "optim_target_modules": ["inner"], "optim_args": "rank=1"},
            "updates each layer within the backward",
        ),
        ({"optim": "muon"}, "computes with whole matrices"),
        ({"optim": "adagrad"}, "makes its state before ZeRO"),
    ],
)
def test_optimizers_that_need_more_than_an_element_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A configuration that allows any optimizer cannot allow one that is known to need more."""
    for allowed in ({}, {"zero_allow_untested_optimizer": True}):
        config = runs.config(3)
        config["deepspeed"] = {**config["deepspeed"], **allowed}
        args = arguments(tmp_path, **config, **options)
        with pytest.raises(ConfigError, match=words):
            Trainer(runs.Net(), args, train_dataset=rows(8)).train()


def test_groups_return_after_a_step_that_failed() -> None:
    """The engine lets the optimizer have one group at a time, and leaves it so if the optimizer's step raises."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": lr} for p, lr in zip(parameters, (0.1, 0.2), strict=True)]
    )
    own = ZeroOptimizer(optimizer)
    flat = [torch.nn.Parameter(torch.ones(4)) for _ in parameters]
    for group, buffer in zip(own.param_groups, flat, strict=True):
        group["params"] = [buffer]
    places = {
        p: Place(buffer, 0, 4, p.shape, 0, ((0, 0, 4),)) for p, buffer in zip(parameters, flat, strict=True)
    }
    own.use_engine(places, lambda: None)
    further = {"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.3}
    for given in (own, optimizer):  # scripts have the second one
        with pytest.raises(ModelError, match="would never update those of a new group"):
            given.add_param_group(further)
    own.param_groups = [own.param_groups[0]]
    own.release()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert [group["params"] for group in optimizer.param_groups] == [[p] for p in parameters]
    optimizer.add_param_group(further)
    assert len(optimizer.param_groups) == 3
