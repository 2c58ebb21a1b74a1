"""The Trainer on a model that is sharded over two ranks: the same run, and checkpoints that fit every strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import launch
from tests.trainer.elastic_ranks import SAMPLES, stretch
from tests.trainer.full_eval_ranks import WAYS, evaluated
from tests.trainer.sharded_ranks import Shifting, untargeted
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, load_weights
from windlass.checkpoint.sharded import load_parts

SCRIPT = Path(__file__).parent / "sharded_ranks.py"
TOLERANCE = 1e-12

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sharded")
    launch(2, SCRIPT, made)
    return made


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Any]:
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second, "ranks disagree"
    return first  # type: ignore[no-any-return]


def data() -> list[dict[str, Any]]:
    return [{**row, "x": row["x"].double()} for row in rows(SAMPLES)]


def test_a_stopped_run_ends_with_the_same_bits(said: dict[str, Any]) -> None:
    assert said["resumed"]["stopped"] == said["resumed"]["clean"]
    assert len(said["resumed"]["clean"]) >= 2, "weights and optimizer"


def test_a_checkpoint_goes_on_replicated_and_alone(folder: Path) -> None:
    alone = stretch(folder / "alone", 12, True)
    assert alone.accelerator.gradient_accumulation_steps == 2
    expected = Net().double()
    load_weights(folder / "clean" / "checkpoint-12", expected)
    replicated = Net().double()
    load_weights(folder / "replicated" / "checkpoint-12", replicated)
    for model in (alone.model, replicated):
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_checkpoints_in_parts_go_on_sharded_and_alone(folder: Path) -> None:
    last = folder / "parts" / "checkpoint-12"
    assert not (last / "model.safetensors").exists()
    assert {"model.parts.json", "model-rank-00001.safetensors", "optimizer-rank-00001.safetensors"} <= {
        file.name for file in last.iterdir()
    }
    expected, parts = Net().double(), Net().double()
    load_weights(folder / "clean" / "checkpoint-12", expected)
    load_parts(last, parts)
    alone = stretch(folder / "parts_alone", 12, True)
    for ours, same, theirs in zip(
        alone.model.parameters(), parts.parameters(), expected.parameters(), strict=True
    ):
        assert torch.equal(same, theirs), "the bits of a run that was not stopped"
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_a_model_that_stays_sharded_evaluates_predicts_saves_and_trains_on(
    said: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    args = arguments(tmp_path, max_steps=3, gradient_accumulation_steps=2)
    trainer = Trainer(Net().double(), args, train_dataset=data(), eval_dataset=data()[:7])
    trainer.train()
    trainer.train()
    after = said["after"]
    for ours, theirs in zip(after["weights"], trainer.model.parameters(), strict=True):
        assert ours == pytest.approx(theirs.flatten().tolist(), abs=TOLERANCE)
    assert after["eval"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=TOLERANCE)
    assert after["streamed"] == pytest.approx(trainer.evaluate(data()[:5])["eval_loss"], abs=TOLERANCE)
    predictions = trainer.predict(data()[:3]).predictions
    assert after["predictions"] == pytest.approx(predictions, abs=TOLERANCE)
    saved = Net().double()
    load_weights(folder / "after", saved)
    assert [p.flatten().tolist() for p in saved.parameters()] == after["weights"]


def test_a_rank_whose_first_batch_has_no_target_keeps_nobody_waiting(
    said: dict[str, Any], tmp_path: Path
) -> None:
    args = {"max_steps": 3, "train_sampling_strategy": "sequential", "per_device_train_batch_size": 4}
    model = Shifting().double()
    Trainer(model, arguments(tmp_path, **args), train_dataset=untargeted()).train()
    for ours, theirs in zip(said["untargeted"], model.parameters(), strict=True):
        assert ours == pytest.approx(theirs.flatten().tolist(), abs=TOLERANCE)


def test_an_optimizer_that_was_there_before_follows(said: dict[str, Any], tmp_path: Path) -> None:
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    args = arguments(tmp_path, max_steps=4, gradient_accumulation_steps=2)
    Trainer(model, args, train_dataset=data(), optimizers=(optimizer, scheduler)).train()
    for ours, theirs in zip(said["own"], model.parameters(), strict=True):
        assert ours == pytest.approx(theirs.flatten().tolist(), abs=TOLERANCE)


def test_an_evaluation_in_few_bits_after_a_sharded_run(tmp_path: Path) -> None:
    launch(2, SCRIPT.with_name("full_eval_ranks.py"), tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    for cast, dtype in (("bf16", "torch.bfloat16"), ("fp16", "torch.float16")):
        alone = evaluated(tmp_path / f"alone {cast}", cast)
        for way in WAYS:
            found = first[f"{way} {cast}"]
            assert found["sharded"] == (way != "replicated")
            assert found["dtypes"] == alone["dtypes"] == [dtype]
            assert found["losses"][0] == found["losses"][1]
            for name in ("losses", "predicted"):
                assert found[name] == pytest.approx(alone[name], rel=5e-3), (way, name)
