from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import launch, launch_as, run_script
from tests.trainer.small import arguments, llama
from tests.zero import built_runs
from tests.zero.needed import needs_deepspeed

from windlass.config.parallel.rows_deepspeed import STAGE
from windlass.config.parallel.sources import OWN_VARIABLE

SCRIPT = Path(built_runs.__file__)
TOLERANCE = 5e-6  # of fp32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    run_script(SCRIPT, folder, "alone", source, -1, "pretrained")
    return {**found_in(folder, "alone"), "weights": weights(folder / "alone")}


def found_in(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def check(folder: Path, name: str, alone: dict[str, Any], divided: bool = True) -> None:
    found = found_in(folder, name)
    here, whole = found["held"]
    assert whole == alone["held"][1]
    assert here <= whole / 2 + 64 if divided else here == whole, "each rank builds its part alone"
    assert (found["flops"], found["trained"]) == (alone["flops"], alone["trained"])
    assert found["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    for tensor, value in weights(folder / name).items():
        torch.testing.assert_close(value, alone["weights"][tensor], rtol=0, atol=TOLERANCE)


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("way", ["pretrained", "model_init"])
def test_no_rank_builds_a_whole_model(way: str, source: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    """It is evaluated before, trained, saved and evaluated after."""
    launch(2, SCRIPT, tmp_path, "run", source, 3, way)
    check(tmp_path, "run", alone)


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("flag", "divided"), [("true", True), ("false", False)])
def test_the_launchers_flag(
    flag: str, divided: bool, source: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    flags = (
        "--use_cpu",
        "--num_processes",
        2,
        "--use_deepspeed",
        "--zero_stage",
        3,
        "--zero3_init_flag",
        flag,
    )
    launch_as(*flags, SCRIPT, tmp_path, "run", source, -1, "pretrained")
    check(tmp_path, "run", alone, divided)


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
def test_new_weights_are_made_in_parts_and_are_the_same_on_all_ranks(source: Path, tmp_path: Path) -> None:
    launch(2, SCRIPT, tmp_path, "run", source, 3, "config")
    here, whole = found_in(tmp_path, "run")["held"]
    assert here <= whole / 2 + 64
    assert all(bool(value.isfinite().all()) for value in weights(tmp_path / "run").values())


@pytest.mark.parametrize("stage", [0, 2])
def test_other_stages_leave_models_whole(stage: int, tmp_path: Path) -> None:
    arguments(tmp_path, deepspeed={"zero_optimization": {"stage": stage}})
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    assert not integration.is_deepspeed_zero3_enabled()


@needs_deepspeed
def test_models_are_whole_again_once_the_arguments_are_gone(tmp_path: Path) -> None:
    args = arguments(tmp_path, deepspeed={"zero_optimization": {"stage": 3}})
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    assert integration.deepspeed_config()["zero_optimization"]["stage"] == 3
    del args
    assert integration.deepspeed_config() is None


@needs_deepspeed
def test_arguments_made_later_and_dropped_do_not_make_models_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    monkeypatch.setenv(
        OWN_VARIABLE, json.dumps({"strategy": ["deepspeed", "", False], STAGE.name: [3, "", False]})
    )
    args = arguments(tmp_path)
    repr(args)  # compares with arguments of its own, of which the launcher asks the same
    assert integration.deepspeed_config() is not None
    others = [dataclasses.replace(args) for _ in range(2)]
    del others[0]
    assert integration.deepspeed_config() is not None
    own = integration.HfDeepSpeedConfig({"zero_optimization": {"stage": 2}})
    del others
    assert integration.deepspeed_config() == own.config, "a script's own setting stays"
    del own, args
    assert integration.deepspeed_config() is None
