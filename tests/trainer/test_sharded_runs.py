"""The Trainer on a model that is sharded over two ranks: the same run, and checkpoints that fit every strategy."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer import full_eval_ranks
from tests.trainer.elastic_ranks import SAMPLES, stretch
from tests.trainer.full_eval_ranks import WAYS, evaluated, reread
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback, load_weights
from windlass.checkpoint.sharded import load_parts
from windlass.core.errors import CheckpointError
from windlass.dist.sharded import is_sharded, whole

TOLERANCE = 1e-12

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module", autouse=True)
def said(folder: Path) -> dict[str, Any]:
    first, second = on_ranks(2, main, folder)
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
    first, second = on_ranks(2, full_eval_ranks.main, tmp_path)
    assert first == second
    for cast, dtype in (("bf16", "torch.bfloat16"), ("fp16", "torch.float16")):
        alone = evaluated(tmp_path / f"alone {cast}", cast)
        for way in WAYS:
            found = first[f"{way} {cast}"]
            assert found["sharded"] == (way != "replicated")
            assert found["dtypes"] == alone["dtypes"] == [dtype]
            assert found["losses"][0] == found["losses"][1]
            # A run in bf16 ends with other weights than one process: they are evaluated in one.
            trained_alike = "bf16" not in WAYS[way]
            wanted = alone if trained_alike else reread(tmp_path / f"{way} {cast}", cast, bf16=True)
            # Layers that compute in bf16 round weights in fp16 a second time: by 2e-4 with six seeds.
            tolerance = 1e-6 if trained_alike or cast == "bf16" else 5e-4
            for name in ("losses", "predicted"):
                assert found[name] == pytest.approx(wanted[name], rel=tolerance), (way, name)


# --- what each rank runs ----------------------------------------------------------------------------------------------


IN_PARTS: dict[str, Any] = {"fsdp": "full_shard"}  # what a sharded run writes by default
SHARDED: dict[str, Any] = {**IN_PARTS, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}
RANK = int(os.environ.get("RANK", 0))


def resumed_runs(folder: Path) -> dict[str, Any]:
    clean = stretch(folder / "clean", 12, False, **SHARDED)
    assert all(is_sharded(p) for p in clean.model.parameters())
    stretch(folder / "stopped", 5, False, **SHARDED)
    if RANK == 0:
        for name in ("replicated", "alone"):
            shutil.copytree(folder / "stopped", folder / name)
    torch.distributed.barrier()
    stretch(folder / "stopped", 12, True, **SHARDED)
    stretch(folder / "replicated", 12, True)
    stretch(folder / "parts", 5, False, **IN_PARTS)
    if RANK == 0:
        shutil.copytree(folder / "parts", folder / "parts_alone")
    torch.distributed.barrier()
    stretch(folder / "parts", 12, True, **IN_PARTS)
    return {name: digest(folder / name / "checkpoint-12") for name in ("clean", "stopped")}


def digest(checkpoint: Path) -> dict[str, str]:
    """Weights and optimizer; what else is in the folder has times and paths in it."""
    files = [checkpoint / "model.safetensors", *sorted(checkpoint.glob("optimizer*"))]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def after_training(folder: Path) -> dict[str, Any]:
    """Evaluation of uneven shares, predictions, saving, and a second run, on the model that stays sharded."""
    data = [{**row, "x": row["x"].double()} for row in rows(SAMPLES)]
    args = arguments(folder / "after", max_steps=3, num_train_epochs=1, **SHARDED)
    trainer = Trainer(Net().double(), args, train_dataset=data, eval_dataset=data[:7])
    trainer.train()
    trainer.evaluate()
    assert all(is_sharded(p) for p in trainer.model.parameters()), "freed after an evaluation"
    trainer.train()
    trainer.save_model()
    (folder / "file").write_text("in the way of a folder")
    with pytest.raises(CheckpointError, match="choose another place"):
        trainer.save_model(str(folder / "file" / "model"))
    predicted = trainer.predict(data[:3])
    streamed = trainer.evaluate(iter_of(data[:5]))
    return {
        "eval": trainer.evaluate()["eval_loss"],
        "streamed": streamed["eval_loss"],
        "predictions": predicted.predictions.tolist(),
        "weights": [whole(p).flatten().tolist() for p in trainer.model.parameters()],
    }


def iter_of(data: list[Any]) -> Any:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(data)

    return Stream()


def one_rank_cannot_save(folder: Path) -> None:
    """It fails beside collectives that the others are in: all stop, and none waits."""
    data = [{**row, "x": row["x"].double()} for row in rows(SAMPLES)]
    args = arguments(folder / "unsaved", max_steps=1, save_strategy="steps", save_steps=1, **SHARDED)
    trainer = Trainer(Net().double(), args, train_dataset=data, callbacks=[Stateless()])
    with pytest.raises(ZeroDivisionError if RANK == 1 else CheckpointError):
        trainer.train()
    torch.distributed.barrier()
    assert not (folder / "unsaved" / "checkpoint-1").exists()


class Stateless(TrainerCallback):
    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"inverse": 1 / (RANK - 1)}}


class Shifting(torch.nn.Module):
    """A causal model: the first label of a row is not a target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))[:, :-1].flatten(0, 1)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())}


def untargeted_rank(folder: Path) -> list[list[float]]:
    """Rank 1's first batch holds no target, so only rank 0's tells what the loss is a mean over."""
    args = {"max_steps": 3, "train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}
    model = Shifting().double()
    trainer = Trainer(model, arguments(folder / "untargeted", **args, **SHARDED), train_dataset=untargeted())
    trainer.train()
    return [whole(p).flatten().tolist() for p in model.parameters()]


def untargeted() -> list[dict[str, torch.Tensor]]:
    tokens = [(torch.arange(5) + index) % 7 for index in range(12)]
    return [
        {"input_ids": row, "labels": row if index not in (2, 3) else torch.full((5,), -100)}
        for index, row in enumerate(tokens)
    ]


def own_optimizer(folder: Path) -> list[list[float]]:
    """An optimizer and a schedule that were made before the model was sharded stay the same objects."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    group = optimizer.param_groups[0]
    args = arguments(folder / "own", max_steps=4, **SHARDED)
    data = [{**row, "x": row["x"].double()} for row in rows(SAMPLES)]
    trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, scheduler))
    trainer.train()
    assert trainer.optimizer is optimizer
    assert optimizer.param_groups[0] is group
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}
    assert group["lr"] == 0.1 * 0.1**2
    return [whole(p).flatten().tolist() for p in model.parameters()]


def main(folder: Path) -> dict[str, Any]:
    found = {
        "resumed": resumed_runs(folder),
        "after": after_training(folder),
        "own": own_optimizer(folder),
        "untargeted": untargeted_rank(folder),
    }
    one_rank_cannot_save(folder)
    return found
