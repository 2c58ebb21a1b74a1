"""Loaders, samplers and columns as scripts bring them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import Net, arguments, rows, weights_hash
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from windlass import Trainer
from windlass.callbacks.weight_averaging import SWACallback
from windlass.core.errors import ConfigError, DataError, ModelError


class Seen(Net):
    """Keeps the first feature of each sample, in the order in which it trained on them."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[float] = []

    def forward(self, x: Any, labels: Any = None) -> Any:
        if torch.is_grad_enabled() and self.training:
            self.order += x[:, 0].tolist()
        return super().forward(x, labels)


def first(data: list[dict[str, Any]]) -> list[float]:
    return [float(row["x"][0]) for row in data]


@pytest.mark.parametrize("older", [True, False])
def test_an_overridden_sampler_gives_the_order(tmp_path: Path, older: bool) -> None:
    class Older(Trainer):
        def _get_train_sampler(self) -> Any:
            return SequentialSampler(self.train_dataset)

    class Newer(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(train_dataset)

    trainer = (Older if older else Newer)(Seen(), arguments(tmp_path, max_steps=4), train_dataset=rows(16))
    trainer.train()
    assert trainer.model.order[-16:] == first(rows(16))  # a probe may have run before


class Copied(Trainer):
    """Overrides the method as scripts do, with the lines of transformers' own."""

    def get_train_dataloader(self) -> Any:
        dataset, collator = self.train_dataset, self.data_collator
        if hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        options = {"batch_size": self._train_batch_size, "collate_fn": collator}
        if not isinstance(dataset, IterableDataset):
            options |= {"sampler": self._get_train_sampler(), "drop_last": self.args.dataloader_drop_last}
        return self.accelerator.prepare(DataLoader(dataset, **options))


class WithSuper(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_train_sampler(*args, **kwargs)


def as_dataset(count: int) -> Any:
    datasets = pytest.importorskip("datasets", reason="has columns")
    texts = [{**row, "x": row["x"].tolist(), "text": "a" * n} for n, row in enumerate(rows(count))]
    return datasets.Dataset.from_list(texts)


@pytest.mark.parametrize("kind", [Copied, WithSuper])
@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length"])
@pytest.mark.parametrize("of_columns", [False, True])
def test_a_copied_loader_gives_the_order_of_the_arguments(
    tmp_path: Path, kind: type[Trainer], strategy: str, of_columns: bool
) -> None:
    data = as_dataset(24) if of_columns else [{**row, "input_ids": [0] * n} for n, row in enumerate(rows(24))]
    if of_columns and strategy == "group_by_length":
        data = data.add_column("input_ids", [[0] * n for n in range(24)])

    class Reading(Seen):
        def forward(self, x: Any, labels: Any = None, input_ids: Any = None) -> Any:
            return super().forward(x, labels)

    changes = {"num_train_epochs": 2, "max_steps": -1, "train_sampling_strategy": strategy}

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        assert all("text" not in sample for sample in samples)
        return {
            "x": torch.stack([torch.as_tensor(sample["x"]) for sample in samples]),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
        }

    trainers = [
        cls(Reading(), arguments(tmp_path, **changes), train_dataset=data, data_collator=collate)
        for cls in (kind, Trainer)
    ]
    for trainer in trainers:
        trainer.train()
    mine, own = (trainer.model.order[-48:] for trainer in trainers)
    assert mine == own
    if strategy == "random":
        assert mine[:24] != mine[24:], "the order of the first epoch again"


def test_a_loader_without_a_dataset(tmp_path: Path) -> None:
    class Batches:
        def __iter__(self) -> Any:
            for start in range(0, 12, 3):
                part = rows(12)[start : start + 3]
                yield {
                    "x": torch.stack([r["x"] for r in part]),
                    "labels": torch.tensor([r["labels"] for r in part]),
                }

        def __len__(self) -> int:
            return 4

    class Mine(Trainer):
        def get_train_dataloader(self) -> Any:
            return Batches()

    trainer = Mine(Net(), arguments(tmp_path, max_steps=-1, num_train_epochs=2))
    assert trainer.train().global_step == 8
    assert trainer.num_examples(Batches()) == 16


def test_a_users_data_loader_trains_as_its_batches_say(tmp_path: Path) -> None:
    class Mine(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)

    mine = Mine(Net(), arguments(tmp_path), train_dataset=rows(16))
    own = Trainer(Net(), arguments(tmp_path, train_sampling_strategy="sequential"), train_dataset=rows(16))
    mine.train()
    own.train()
    assert weights_hash(mine.model) == weights_hash(own.model)


class Map(Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        self.rows = rows(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        yield from rows(self.count)


def test_all_kinds_of_data(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    listed = [{"x": row["x"].tolist(), "labels": row["labels"]} for row in rows(12)]
    for data in (rows(12), Map(12), Stream(12), datasets.Dataset.from_list(listed)):
        trainer = Trainer(Net(), arguments(tmp_path, max_steps=5), train_dataset=data, eval_dataset=data)
        assert trainer.train().global_step == 5
        assert trainer.evaluate()["eval_loss"] > 0
        assert trainer.predict(data).predictions.shape == (12, 3)


def test_a_stream_needs_a_number_of_updates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_steps"):
        Trainer(Net(), arguments(tmp_path, max_steps=-1), train_dataset=Stream(8)).train()


@pytest.mark.parametrize("kind", ["rows", "datasets"])
def test_columns_that_the_model_does_not_take(tmp_path: Path, kind: str) -> None:
    data: Any = [{"x": row["x"].tolist(), "labels": row["labels"], "extra": 1} for row in rows(8)]
    if kind == "datasets":
        data = pytest.importorskip("datasets").Dataset.from_list(data)
    assert Trainer(Net(), arguments(tmp_path), train_dataset=data).train().global_step == 4
    with pytest.raises((TypeError, ModelError, DataError)):
        Trainer(Net(), arguments(tmp_path, remove_unused_columns=False), train_dataset=data).train()


def test_nothing_that_fits_is_an_error_with_both_sides(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"words") as caught:
        Trainer(Net(), arguments(tmp_path), train_dataset=[{"words": 1}]).train()
    assert "labels" in str(caught.value)


def test_own_signature_columns(tmp_path: Path) -> None:
    class Mine(Trainer):
        def _set_signature_columns_if_needed(self) -> None:
            self._signature_columns = ["x", "labels", "weight"]

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            assert set(inputs) == {"x", "labels", "weight"}
            inputs.pop("weight")
            return super().compute_loss(model, inputs, return_outputs)

    data = [{**row, "weight": 1.0, "other": 2.0} for row in rows(8)]
    assert Mine(Net(), arguments(tmp_path), train_dataset=data).train().global_step == 4


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train_dataset"):
        Trainer(Net(), arguments(tmp_path)).train()
    with pytest.raises(DataError, match="empty"):
        Trainer(Net(), arguments(tmp_path), train_dataset=[]).train()
    with pytest.raises(ModelError, match="no loss"):
        Trainer(Net(), arguments(tmp_path), train_dataset=[{"x": row["x"]} for row in rows(8)]).train()


def test_batches_and_counts_for_scripts(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path), train_dataset=rows(10))
    loader = trainer.get_train_dataloader()
    assert loader.total_batch_size == 4
    assert len(loader) == 3
    batches, count = trainer.get_batch_samples(iter(loader), 2, torch.device("cpu"))
    assert [len(batch["labels"]) for batch in batches] == [4, 4]
    assert int(count) == 8
    assert trainer.num_examples(loader) == 10
    assert trainer.get_total_train_batch_size(trainer.args) == 4
    assert trainer.get_tp_size() == trainer.get_cp_size() == trainer.get_sp_size() == 1


def test_an_overridden_evaluation_sampler_gives_the_order(tmp_path: Path) -> None:
    class Mine(Trainer):
        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            return list(reversed(range(len(eval_dataset))))

    class AsItStands(Trainer):
        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            return None

    data = rows(7)
    plain = Trainer(Net(), arguments(tmp_path)).predict(data)
    for kind in (Mine, AsItStands):
        output = kind(Net(), arguments(tmp_path)).predict(data)
        assert sorted(output.label_ids.tolist()) == sorted(plain.label_ids.tolist())
        assert kind(Net(), arguments(tmp_path), eval_dataset=data).evaluate()["eval_loss"] == pytest.approx(
            plain.metrics["test_loss"]
        )


@pytest.mark.parametrize("given", [{"max_steps": 3}, "out", object()])
def test_other_things_than_arguments_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"args='builtins\..*windlass.TrainingArguments"):
        Trainer(Net(), given, train_dataset=rows(4))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data_collator": "padding"}, "data_collator='padding'"),
        ({"callbacks": SWACallback()}, r"callbacks='SWACallback': give a list .*\[SWACallback\]"),
        ({"callbacks": SWACallback}, r"callbacks='SWACallback': give a list .*\[SWACallback\]"),
        ({"optimizer_cls_and_kwargs": torch.optim.SGD}, "optimizer_cls_and_kwargs=.*give a pair"),
    ],
)
def test_arguments_of_another_kind_are_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(Net(), arguments(tmp_path), train_dataset=rows(4), **given)


def test_resuming_from_neither_true_nor_a_path_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path), train_dataset=rows(4))
    with pytest.raises(ConfigError, match="resume_from_checkpoint=3"):
        trainer.train(resume_from_checkpoint=3)  # type: ignore[arg-type]


def test_a_script_makes_its_loader_through_the_trainer(tmp_path: Path) -> None:
    """As trainers of other libraries do: larger batches than the arguments', in an order of their own."""

    class Repeats(Trainer):
        def get_train_dataloader(self) -> Any:
            return self._get_dataloader(
                dataset=self.train_dataset,
                description="Training",
                batch_size=self._train_batch_size * 2,
                sampler_fn=lambda dataset: [index for index in range(len(dataset)) for _ in range(2)],
                is_training=True,
            )

    args = arguments(tmp_path, max_steps=2, per_device_train_batch_size=2)
    trainer = Repeats(Seen(), args, train_dataset=rows(4))
    trainer.train()
    assert trainer.model.order[-8:] == [value for value in first(rows(4)) for _ in range(2)]
    assert trainer.state.epoch == 1.0
    batches = trainer._get_dataloader(rows(5), "test", 3)
    assert [batch["labels"].shape[0] for batch in batches] == [3, 2]


def test_a_loader_with_fewer_batches_than_its_length_says_is_named(tmp_path: Path, caplog: Any) -> None:
    class Short(DataLoader[Any]):
        def __iter__(self) -> Any:
            return itertools.islice(super().__iter__(), 2)

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return Short(self.train_dataset, batch_size=2, collate_fn=self.data_collator)

    caplog.set_level("WARNING", logger="windlass")
    trainer = Own(Net(), arguments(tmp_path, max_steps=8), train_dataset=rows(8))
    assert trainer.train().global_step == 4
    assert "the data ended after 4 of 8 updates" in caplog.text


def test_an_override_of_the_loader_is_called_for_all_three(tmp_path: Path) -> None:
    called = []

    class Mine(Trainer):
        def _get_dataloader(
            self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None,
            is_training: bool = False, dataloader_key: str | None = None,
        ) -> Any:  # fmt: skip
            called.append((len(dataset), description, batch_size, is_training, dataloader_key))
            return super()._get_dataloader(
                dataset, description, batch_size, sampler_fn, is_training, dataloader_key
            )

    args = arguments(tmp_path, max_steps=1, per_device_train_batch_size=2, per_device_eval_batch_size=3)
    trainer = Mine(Net(), args, train_dataset=rows(8), eval_dataset={"a": rows(4), "b": rows(5)})
    trainer.train()
    trainer.evaluate()
    trainer.evaluate(rows(6))
    trainer.predict(rows(7))
    assert called == [
        (8, "Training", 2, True, None), (4, "Evaluation", 3, False, "a"), (5, "Evaluation", 3, False, "b"),
        (6, "Evaluation", 3, False, "eval"), (7, "test", 3, False, None),
    ]  # fmt: skip
