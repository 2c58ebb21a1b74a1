"""`evaluate`: which sets, which metrics, and what it leaves untouched."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import failure_on_ranks, on_ranks
from tests.trainer.small import Net, arguments, rows, weights_hash

from windlass import LossTerms, Trainer, default_data_collator
from windlass.core.errors import ConfigError, DataError, PeerError


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def exact_loss(model: torch.nn.Module, samples: list[dict[str, Any]]) -> float:
    with torch.no_grad():
        labels = torch.tensor([s["labels"] for s in samples])
        return float(model(torch.stack([s["x"] for s in samples]), labels)["loss"])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 9])
def test_the_loss_is_exact_for_every_batch_size(tmp_path: Path, size: int) -> None:
    data = rows(7)
    trainer = Trainer(Net().double(), arguments(tmp_path, per_device_eval_batch_size=size), eval_dataset=[
        {**row, "x": row["x"].double()} for row in data
    ])  # fmt: skip
    expected = exact_loss(trainer.model, [{**row, "x": row["x"].double()} for row in data])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-12)


def test_sets_by_name_and_by_dict(tmp_path: Path) -> None:
    sets = {"near": rows(5), "far": rows(6, seed=9)}
    trainer = Trainer(Net(), arguments(tmp_path), eval_dataset=sets, compute_metrics=accuracy)
    whole = trainer.evaluate()
    for name, data in sets.items():
        assert whole[f"eval_{name}_loss"] == pytest.approx(exact_loss(trainer.model, data))
        one = trainer.evaluate(name)
        assert one["eval_loss"] == whole[f"eval_{name}_loss"]
        assert one["eval_accuracy"] == whole[f"eval_{name}_accuracy"]
    given = trainer.evaluate({"new": rows(3)}, metric_key_prefix="test")
    assert given["test_new_loss"] == pytest.approx(exact_loss(trainer.model, rows(3)))
    with pytest.raises(DataError, match=r"'other'.*near, far"):
        trainer.evaluate("other")


class Readers(torch.utils.data.Dataset[dict[str, Any]]):
    """Each sample has the number of the process that read it."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**rows(6)[index], "reader": os.getpid()}


class StreamedReaders(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return (Readers()[index] for index in range(6))


class WithReaders(Net):
    def __init__(self) -> None:
        super().__init__()
        self.readers: set[int] = set()

    def forward(self, x: Any, labels: Any = None, reader: Any = None) -> Any:
        self.readers |= set(reader.tolist())
        return super().forward(x, labels)


@pytest.mark.parametrize("data", [Readers, StreamedReaders])
@pytest.mark.parametrize("persistent", [True, False])
def test_persistent_workers_are_kept_between_evaluations(tmp_path: Path, data: Any, persistent: bool) -> None:
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": persistent}
    trainer = Trainer(WithReaders(), arguments(tmp_path, **options), eval_dataset=data())

    def readers() -> set[int]:
        trainer.model.readers = set()
        trainer.evaluate()
        return trainer.model.readers

    first = readers()
    assert os.getpid() not in first
    assert (readers() == first) == persistent
    next(iter(trainer.get_eval_dataloader()))  # a pass that is dropped ends its workers
    left = readers()
    assert left != first
    trainer.data_collator = default_data_collator
    assert readers() != left


def test_what_cannot_be_evaluated_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="eval_dataset"):
        Trainer(Net(), arguments(tmp_path)).evaluate()
    with pytest.raises(ConfigError, match="eval_strategy"):
        Trainer(Net(), arguments(tmp_path, eval_strategy="epoch"), train_dataset=rows(4)).train()
    once = Trainer(
        Net(), arguments(tmp_path, eval_strategy="epoch"), train_dataset=rows(4), eval_dataset=iter(rows(4))
    )
    with pytest.raises(ConfigError, match="first evaluation reads a generator to the end"):
        once.train()
    assert "eval_loss" in once.evaluate()


def test_an_empty_set_is_a_warning_and_gives_metrics_without_a_loss(tmp_path: Path, caplog: Any) -> None:
    def accuracy(prediction: Any) -> dict[str, float]:
        raise AssertionError("there is nothing to measure")

    logging.getLogger("windlass").propagate = True
    try:
        trainer = Trainer(Net(), arguments(tmp_path), eval_dataset=[], compute_metrics=accuracy)
        metrics = trainer.evaluate()
        predicted = trainer.predict([])
    finally:
        logging.getLogger("windlass").propagate = False
    assert "eval_runtime" in metrics
    assert not {"eval_loss", "eval_accuracy"} & metrics.keys()
    assert predicted.predictions is None
    assert "the evaluation data is empty: no loss and no metrics eval_*" in caplog.text
    with pytest.raises(DataError, match="empty"):
        Trainer(Net(), arguments(tmp_path), train_dataset=[]).train()


def test_evaluation_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    class Dropping(Net):
        def forward(self, x: Any, labels: Any = None) -> Any:
            return super().forward(torch.nn.functional.dropout(x, 0.5, self.training), labels)

    hashes = set()
    for every in (None, 1, 2):
        changes = (
            {} if every is None else {"eval_strategy": "steps", "eval_steps": every, "eval_on_start": True}
        )
        trainer = Trainer(
            Dropping(), arguments(tmp_path, **changes), train_dataset=rows(16), eval_dataset=rows(5)
        )
        trainer.train()
        hashes.add(weights_hash(trainer.model))
        assert trainer.model.training is (every is None), "the last evaluation left it in its mode"
    assert len(hashes) == 1


def test_loss_only_says_once_that_metrics_are_left_out(tmp_path: Path, caplog: Any) -> None:
    from windlass.core import logs

    logs.warn_once.cache_clear()
    trainer = Trainer(
        Net(),
        arguments(tmp_path, prediction_loss_only=True),
        eval_dataset=rows(4),
        compute_metrics=accuracy,
    )
    assert "eval_accuracy" not in trainer.evaluate()
    trainer.evaluate()
    assert caplog.text.count("compute_metrics is not called") == 1


def test_loss_only_cannot_follow_a_metric(tmp_path: Path) -> None:
    args = arguments(
        tmp_path, prediction_loss_only=True, eval_strategy="steps", save_strategy="best",
        metric_for_best_model="accuracy",
    )  # fmt: skip
    trainer = Trainer(Net(), args, train_dataset=rows(8), eval_dataset=rows(4), compute_metrics=accuracy)
    with pytest.raises(ConfigError, match="accuracy"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_metric_that_fails_on_one_batch_does_not_stop_a_run_before_it_began(tmp_path: Path) -> None:
    def needs_all(prediction: Any) -> dict[str, float]:
        assert len(prediction.predictions) == 9, "undefined on so few samples"
        return accuracy(prediction)

    args = arguments(
        tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="best", metric_for_best_model="accuracy"
    )
    trainer = Trainer(Net(), args, train_dataset=rows(16), eval_dataset=rows(9), compute_metrics=needs_all)
    trainer.train()
    assert trainer.state.best_metric is not None


def test_eval_on_start_comes_before_the_first_update(tmp_path: Path) -> None:
    trainer = Trainer(
        Net(),
        arguments(tmp_path, eval_on_start=True, max_steps=1),
        train_dataset=rows(8),
        eval_dataset=rows(5),
    )
    untrained = exact_loss(trainer.model, rows(5))
    trainer.train()
    assert trainer.state.log_history[0]["eval_loss"] == pytest.approx(untrained)
    assert trainer.state.log_history[0]["step"] == 0


def test_an_overridden_step_and_loop_are_used(tmp_path: Path) -> None:
    class Mine(Trainer):
        def prediction_step(
            self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
        ) -> Any:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return loss * 0 + 2.5, logits, labels

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(*args, **kwargs)
            output.metrics[f"{kwargs.get('metric_key_prefix', 'eval')}_mine"] = 7.0
            return output

    trainer = Mine(
        Net(),
        arguments(tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="best", metric_for_best_model="mine"),
        train_dataset=rows(8), eval_dataset=rows(5),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == 7.0
    assert trainer.evaluate()["eval_loss"] == 2.5


def test_loss_terms_and_an_override_of_evaluate(tmp_path: Path) -> None:
    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            total = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
            terms = LossTerms(total, float(len(labels)))
            return (terms, outputs) if return_outputs else terms

        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {**super().evaluate(*args, **kwargs), "eval_extra": 1.0}

    trainer = Mine(
        Net(),
        arguments(tmp_path, eval_strategy="steps", eval_steps=4, save_strategy="best", metric_for_best_model="extra"),
        train_dataset=rows(16), eval_dataset=rows(7),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == 1.0
    assert trainer.evaluate()["eval_loss"] == pytest.approx(exact_loss(trainer.model, rows(7)), rel=1e-6)


def test_memory_is_measured_where_asked_for(tmp_path: Path) -> None:
    for asked in (True, False):
        trainer = Trainer(
            Net(), arguments(tmp_path, skip_memory_metrics=not asked, max_steps=1), train_dataset=rows(4),
            eval_dataset=rows(4),
        )  # fmt: skip
        for prefix, metrics in (
            ("train", trainer.train().metrics), ("eval", trainer.evaluate()), ("test", trainer.predict(rows(4)).metrics)
        ):  # fmt: skip
            assert (metrics.get(f"{prefix}_peak_memory_process_gib", 0) > 0) == asked


def test_full_eval_in_bf16_casts_the_model_after_training(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path, bf16_full_eval=True), train_dataset=rows(8))
    trainer.train()
    assert trainer.model.layer.weight.dtype == torch.float32
    data = [{**row, "x": row["x"].bfloat16()} for row in rows(6)]
    assert trainer.evaluate(data)["eval_loss"] > 0
    assert trainer.model.layer.weight.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="bf16_full_eval=True: an evaluation has cast the weights to bf16"):
        trainer.train()
    trainer.model, trainer.optimizer, trainer.lr_scheduler = Net(), None, None
    trainer.train()
    args = arguments(tmp_path, bf16_full_eval=True, eval_strategy="epoch")
    with pytest.raises(ConfigError, match="bf16_full_eval"):
        Trainer(Net(), args, train_dataset=rows(8), eval_dataset=rows(4)).train()


def test_full_eval_of_weights_in_that_type_leaves_them_trainable(tmp_path: Path) -> None:
    data = [{**row, "x": row["x"].bfloat16()} for row in rows(8)]
    trainer = Trainer(Net().bfloat16(), arguments(tmp_path, bf16_full_eval=True), train_dataset=data)
    for _ in range(2):
        assert trainer.train().global_step > 0
        assert trainer.evaluate(data)["eval_loss"] > 0


def test_label_names_may_be_none_at_all(tmp_path: Path) -> None:
    trainer = Trainer(
        Net(), arguments(tmp_path, label_names=[]), eval_dataset=[{"x": r["x"]} for r in rows(5)]
    )
    assert trainer.label_names == []
    assert "eval_loss" not in trainer.evaluate()


@pytest.mark.dist
def test_ranks_without_a_first_batch_measure_the_loss_with_the_others(tmp_path: Path) -> None:
    """What is evaluated before the first update is measured first: by a rank that has nothing to read, or cannot."""
    alone = evaluated_first(tmp_path / "alone")
    for losses, failure in on_ranks(2, on_each_rank, tmp_path):
        assert losses == pytest.approx(alone, rel=1e-6)
        assert failure.endswith("no such sample")
    assert "OSError: no such sample" in failure_on_ranks(2, sharded, tmp_path)


# --- what each rank runs ----------------------------------------------------------------------------------------------


class Tokens(torch.nn.Module):
    """Its loss is a sum over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.into, self.out = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.out(self.into(ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss, "logits": logits}


class Unreadable(torch.utils.data.Dataset[dict[str, Any]]):
    """Its third sample, which the second rank reads first, cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 2:
            raise OSError("no such sample")
        return rows(8)[index]


def evaluated_first(folder: Path) -> list[float]:
    """The loss of one row, which the second of two ranks does not have."""
    data = [{"ids": torch.arange(5) + at, "labels": torch.arange(5)} for at in range(4)]
    args = arguments(folder, eval_on_start=True, max_steps=1, per_device_eval_batch_size=2)
    trainer = Trainer(Tokens(), args, train_dataset=data, eval_dataset=data[:1])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return [before, trainer.state.log_history[0]["eval_loss"]]


def on_each_rank(folder: Path) -> tuple[list[float], str]:
    losses = evaluated_first(folder / "ranks")
    trainer = Trainer(
        Net(), arguments(folder / "broken", per_device_eval_batch_size=2), eval_dataset=Unreadable()
    )
    with pytest.raises((OSError, PeerError)) as caught:
        trainer.evaluate()
    return losses, str(caught.value)


def sharded(folder: Path) -> None:
    """The measurement needs forwards of all ranks, and one cannot read."""
    args = arguments(folder, fsdp="full_shard", eval_on_start=True, per_device_eval_batch_size=2)
    Trainer(Net(), args, train_dataset=rows(8), eval_dataset=Unreadable()).train()
