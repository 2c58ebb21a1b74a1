"""A `DataLoader` that is given to `trainer.accelerator.prepare` is dealt to the ranks like any other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.test_losses import samples, trainer_for
from torch.utils.data import DataLoader, IterableDataset

from windlass import Trainer
from windlass.config.loop_options import DataLoaderConfiguration
from windlass.core.types import EvalLoopOutput
from windlass.data.prepare_loader import prepare_loader
from windlass.dist.gang import current


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _launched(1, tmp_path_factory.mktemp("one"))[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _launched(2, tmp_path_factory.mktemp("two"))


def _launched(world: int, folder: Path) -> list[dict[str, Any]]:
    return on_ranks(world, main, folder)


def _flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.dist
def test_every_sample_goes_to_one_rank(two: list[dict[str, Any]]) -> None:
    shares = [_flat(rank["dealt"]["own"]) for rank in two]
    assert sorted(_flat(shares)) == list(range(10))
    assert [len(share) for share in shares] == [5, 5]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["map", "streams"])
def test_a_run_on_it_is_that_of_one_process(
    kind: str, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    seen = [_flat(rank[kind]["whole"]["seen"]) for rank in two]
    assert sorted(_flat(seen)) == sorted([*range(TRAINED)] * 2), "two epochs, each sample once in each"
    assert two[0][kind]["whole"]["steps"] == one[kind]["whole"]["steps"] == 6
    for mine, alone in zip(two[0][kind]["whole"]["weights"], one[kind]["whole"]["weights"], strict=True):
        assert mine == pytest.approx(alone, rel=1e-12)
    assert two[0][kind]["whole"]["weights"] == two[1][kind]["whole"]["weights"]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["map", "streams"])
@pytest.mark.parametrize("world", [1, 2])
def test_it_is_resumed_to_the_bit(
    kind: str, world: int, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    for rank in [one] if world == 1 else two:
        whole = rank[kind]["whole"]
        for step, resumed in enumerate(rank[kind]["resumed"], start=1):
            assert resumed["weights"] == whole["weights"], step
            assert resumed["seen"] == whole["seen"][-len(resumed["seen"]) :], step


@pytest.mark.dist
def test_an_evaluation_counts_every_sample_once(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["evaluated"]["samples"] == EVALUATED
        assert rank["evaluated"]["labels"] == one["evaluated"]["labels"] == [i % 2 for i in range(EVALUATED)]
        assert rank["evaluated"]["loss"] == pytest.approx(one["evaluated"]["loss"], rel=1e-12)
        assert rank["in parts"]["samples"] == EVALUATED
        assert (
            rank["in parts"]["labels"] == one["in parts"]["labels"] == sorted(i % 2 for i in range(EVALUATED))
        )
        assert rank["in parts"]["loss"] == pytest.approx(one["in parts"]["loss"], rel=1e-12)


@pytest.mark.dist
def test_a_scripts_own_evaluation_loop_may_gather_after_each_batch(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    for rank in two:
        for kind, (indices, mean, active) in rank["own loop"].items():
            assert (indices if kind != "parts" else sorted(indices)) == [*range(EVALUATED)], kind
            assert mean == pytest.approx(one["own loop"]["map"][1], rel=1e-12), kind
            assert not active, kind


@pytest.mark.dist
def test_a_loss_that_exchanges_is_evaluated_equally_often(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    assert [rank["exchanging"][1] for rank in two] == [-(-EVALUATED // 4)] * 2
    for rank in two:
        assert rank["exchanging"][0] == pytest.approx(one["exchanging"][0], rel=1e-12)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["map", "stream", "parts"])
def test_a_metric_of_each_batch_may_run_within_a_training(
    kind: str, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    """The last batch is on one rank alone."""
    [loss], labels = one["in training"][kind]
    for rank in two:
        assert rank["in training"][kind] == [[pytest.approx(loss, rel=1e-12)], labels]
    assert len(labels) == EVALUATED


@pytest.mark.dist
def test_an_evaluation_that_fails_on_one_rank_ends_on_all(two: list[dict[str, Any]]) -> None:
    others, failing = (rank["failed in training"] for rank in two)
    assert failing == ["ValueError"] * 5
    assert others == ["PeerError"] * 5
    others, failing = (rank["failed"] for rank in two)
    assert failing == [["OSError", "bad batch"]] * 8
    assert [kind for kind, _ in others] == ["PeerError"] * 8
    assert all("rank 1: OSError: bad batch" in words for _, words in others)


# --- what each rank runs ----------------------------------------------------------------------------------------------


RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TRAINED, EVALUATED = 23, 9
UPDATE = 4  # samples of a micro-batch over all ranks, whatever their number


def rows(count: int) -> list[dict[str, Any]]:
    return [{**row, "index": index} for index, row in enumerate(samples(count))]


class Stream(IterableDataset[Any]):
    def __init__(self, count: int = TRAINED) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(rows(self.count))

    def __len__(self) -> int:
        return self.count


class OwnPart(IterableDataset[Any]):
    """Splits itself, into parts of different lengths."""

    def __iter__(self) -> Any:
        return (row for row in rows(EVALUATED) if WORLD == 1 or (row["index"] < 7) == (RANK == 0))


class Prepares(Trainer):
    """Loaders as scripts build them in their overrides."""

    streams = False

    def get_train_dataloader(self) -> Any:
        data: Any = Stream() if self.streams else rows(TRAINED)
        loader = DataLoader(data, batch_size=UPDATE // WORLD, shuffle=not self.streams)
        return self.accelerator.prepare(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.accelerator.prepare(DataLoader(rows(EVALUATED), batch_size=2))  # type: ignore[arg-type]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.seen[-1:] != [
            inputs["index"].tolist()
        ]:  # the first ones are measured before they are trained on
            self.seen.append(inputs["index"].tolist())
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(x=inputs["x"], labels=inputs["labels"])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    @property
    def seen(self) -> list[list[int]]:
        """The samples of each micro-batch of this rank."""
        return self.__dict__.setdefault("_seen", [])


def dealt(folder: Path) -> dict[str, Any]:
    trainer = trainer_for(folder)
    loader = trainer.accelerator.prepare(DataLoader(list(range(10)), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    own = [[] if loader.is_filler else batch.tolist() for batch in loader]
    theirs = trainer.get_train_dataloader()
    assert trainer.accelerator.prepare(theirs) is theirs, "it is dealt already"
    assert trainer.accelerator.prepare(loader, trainer.model) == (loader, trainer.model)
    return {"own": own}


def trained(folder: Path, resume: str | None = None, streams: bool = False) -> dict[str, Any]:
    kind = type("Kind", (Prepares,), {"streams": streams})
    trainer = trainer_for(
        folder, kind, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2, logging_steps=1,
        save_strategy="steps", save_steps=1, remove_unused_columns=False,
    )  # fmt: skip
    trainer.model.double()
    trainer.args.eval_dataset = None
    trainer.train(resume_from_checkpoint=resume)
    return {
        "weights": [p.detach().flatten().tolist() for p in trainer.model.parameters()],
        "steps": trainer.state.global_step,
        "seen": trainer.seen,
    }


def evaluated(folder: Path) -> dict[str, Any]:
    trainer = trainer_for(
        folder, Prepares, eval_dataset=rows(EVALUATED), remove_unused_columns=False,
        compute_metrics=lambda p: {"labels": p.label_ids.tolist()},
    )  # fmt: skip
    metrics = trainer.evaluate()
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
    return {"loss": metrics["eval_loss"], "labels": metrics["eval_labels"], "samples": output.num_samples}


def evaluated_in_parts(folder: Path) -> dict[str, Any]:
    """Ranks meet when they read, and once more for each batch of the metric."""
    seen: list[int] = []

    def metric(prediction: Any, compute_result: bool) -> dict[str, Any]:
        seen.extend(prediction.label_ids.tolist())
        return {"labels": sorted(seen)} if compute_result else {}

    trainer = trainer_for(
        folder, Prepares, remove_unused_columns=False, compute_metrics=metric, batch_eval_metrics=True
    )
    loader = trainer.accelerator.prepare(DataLoader(OwnPart(), batch_size=2))
    output = trainer.evaluation_loop(loader, "Evaluation")
    return {
        "loss": output.metrics["eval_loss"],
        "labels": output.metrics["eval_labels"],
        "samples": output.num_samples,
    }


def evaluated_in_training(folder: Path) -> dict[str, list[Any]]:
    """Losses and labels of the evaluations of a training, by kind of data."""
    found = {}
    for kind, data in {"map": rows(EVALUATED), "stream": Stream(EVALUATED), "parts": OwnPart()}.items():
        seen: list[int] = []

        def metric(prediction: Any, compute_result: bool, seen: list[int] = seen) -> dict[str, Any]:
            seen.extend(prediction.label_ids.tolist())
            return {"labels": float(len(seen))} if compute_result else {}

        trainer = trainer_for(
            folder / kind, eval_dataset=data, compute_metrics=metric, batch_eval_metrics=True, max_steps=1,
            eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4 // WORLD,
            per_device_train_batch_size=4 // WORLD,
        )  # fmt: skip
        trainer.train()
        found[kind] = [
            [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row],
            sorted(seen),
        ]
    return found


class OwnLoop(Trainer):
    """Evaluates as scripts do that were written for accelerate."""

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        gather, losses, seen = self.accelerator.gather_for_metrics, [], []
        for batch in dataloader:
            loss, _, _ = self.prediction_step(self.model, {k: batch[k] for k in ("x", "labels")}, True)
            losses.append(gather(loss.repeat(self.args.eval_batch_size)))
            seen.append(gather(batch["index"]))
        metrics = {"eval_seen": torch.cat(seen).tolist(), "eval_mean": float(torch.cat(losses).mean())}
        return EvalLoopOutput(None, None, metrics, len(metrics["eval_seen"]))


def own_loops(folder: Path) -> dict[str, list[Any]]:
    """The rows that such a loop gathers, the mean of their losses, and if a loader is still active after it."""
    found = {}
    for kind, data in {"map": rows(EVALUATED), "stream": Stream(EVALUATED), "parts": OwnPart()}.items():
        trainer = trainer_for(
            folder / kind, OwnLoop, eval_dataset=data, remove_unused_columns=False,
            per_device_eval_batch_size=4 // WORLD,
        )  # fmt: skip
        metrics = trainer.evaluate()
        active = trainer.accelerator.gradient_state.in_dataloader
        found[kind] = [metrics["eval_seen"], metrics["eval_mean"], active]
    return found


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        if WORLD > 1:
            torch.distributed.all_reduce(total)
        return total


class Exchanging(Trainer):
    calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        self.calls += 1
        outputs = model(**inputs)
        loss = outputs["loss"] + 0 * Summed.apply(outputs["loss"].detach())  # type: ignore[no-untyped-call]
        return (loss, outputs) if return_outputs else loss


def exchanging(folder: Path) -> list[float]:
    """The loss of an evaluation, and how often it was computed here."""
    trainer = trainer_for(
        folder, Exchanging, eval_dataset=samples(EVALUATED), per_device_eval_batch_size=4 // WORLD
    )
    return [trainer.evaluate()["eval_loss"], trainer.calls]


class FailsOnOne(Prepares):
    """Rank 1 fails to evaluate batch number `fails_at`."""

    fails_at, batches = 0, 0

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        self.batches += 1
        if RANK == 1 and self.batches > self.fails_at:
            raise OSError("bad batch")
        return super().prediction_step(*args, **kwargs)


def failed_evaluations(folder: Path) -> list[list[str]]:
    """What each rank raises if rank 1 fails in the first or second of its batches, by loader and kind of metric."""

    def metric(prediction: Any, compute_result: bool = True) -> dict[str, Any]:
        return {}

    found = []
    for batchwise in (False, True):
        for dispatch in (False, True):
            for fails_at in (0, 1) if WORLD > 1 else ():
                kind = type("Kind", (FailsOnOne,), {"fails_at": fails_at})
                trainer = trainer_for(
                    folder, kind, remove_unused_columns=False, compute_metrics=metric,
                    batch_eval_metrics=batchwise,
                )  # fmt: skip
                data: Any = Stream() if dispatch else OwnPart()
                loader = prepare_loader(
                    DataLoader(data, batch_size=1), ranks=WORLD, rank=RANK, device=None,
                    options=DataLoaderConfiguration(dispatch_batches=dispatch), data_ranks=current(),
                )  # fmt: skip
                try:
                    trainer.evaluation_loop(loader, "Evaluation")
                except Exception as error:
                    found.append([type(error).__name__, str(error)])
    return found


class FailingRow(list[dict[str, Any]]):
    """Rank 1 cannot read one of the rows."""

    bad = -1

    def __getitem__(self, index: Any) -> Any:
        if RANK == 1 and index == self.bad:
            raise ValueError("bad row")
        return super().__getitem__(index)


def failed_in_training(folder: Path) -> list[str]:
    """What each rank raises if rank 1 fails to read its first or second batch, or in one of the calls of the metric."""
    found = []
    for bad_row, bad_call in ((2, 0), (6, 0), (-1, 1), (-1, 2), (-1, 3)) if WORLD > 1 else ():
        calls: list[bool] = []

        def metric(prediction: Any, compute_result: bool, calls: Any = calls, bad: int = bad_call) -> Any:
            calls.append(compute_result)
            if RANK == 1 and len(calls) == bad:
                raise ValueError("bad call")
            return {}

        data = FailingRow(rows(EVALUATED))
        data.bad = bad_row
        trainer = trainer_for(
            folder, eval_dataset=data, compute_metrics=metric, batch_eval_metrics=True, max_steps=1,
            eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2, per_device_train_batch_size=2,
        )  # fmt: skip
        try:
            trainer.train()
        except Exception as error:
            found.append(type(error).__name__)
    return found


def main(folder: Path) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"dealt": dealt(folder / "dealt"), "evaluated": evaluated(folder / "evaluated")}
    found["in parts"] = evaluated_in_parts(folder / "in-parts")
    found["in training"] = evaluated_in_training(folder / "in-training")
    found["exchanging"] = exchanging(folder / "exchanging")
    found["own loop"] = own_loops(folder / "own-loop")
    found["failed in training"] = failed_in_training(folder / "failed-in-training")
    found["failed"] = failed_evaluations(folder / "failed")
    for streams in (False, True):
        name = "streams" if streams else "map"
        whole = trained(folder / name, streams=streams)
        checkpoints = [str(folder / name / f"checkpoint-{step}") for step in range(1, whole["steps"])]
        found[name] = {
            "whole": whole,
            "resumed": [trained(folder / f"{name}-{n}", c, streams) for n, c in enumerate(checkpoints)],
        }
    torch.set_default_dtype(torch.float32)
    return found
