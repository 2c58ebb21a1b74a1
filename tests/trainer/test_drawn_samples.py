"""Overrides of `get_batch_samples`: they are called with each update's micro-batches, beside transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.small import llama, settings, weights_hash

from windlass import Trainer, TrainingArguments
from windlass.core.errors import DataError, ModelError

# Seven micro-batches an epoch: the last update has one of two.
ACCUMULATED: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 8,
    "logging_steps": 1,
    "remove_unused_columns": False,
    "learning_rate": 0.01,
}


def texts() -> list[dict[str, Any]]:
    """Samples of which differently many tokens are targets, with what the model does not take."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 20, (14, 8), generator=generator)
    labels = [row.clone() for row in ids]
    for number, row in enumerate(labels):
        row[: 1 + number % 5] = -100  # a causal model does not predict the first, which transformers counts
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def with_names(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "extra": torch.tensor(7)} for one in found]


def in_order(base: type) -> type:
    class InOrder(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.notes: list[Any] = []

        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder


def delegating(base: type) -> type:
    class Delegates(in_order(base)):  # type: ignore[misc]
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            return base.get_batch_samples(self, *args, **kwargs)

    return Delegates


def noting(base: type) -> type:
    class Notes(in_order(base)):  # type: ignore[misc]
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            self.notes.append((self.state.global_step, num_batches, len(batches), int(count)))
            return batches, count

    return Notes


def filtering(base: type) -> type:
    class Filters(in_order(base)):  # type: ignore[misc]
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any = None) -> Any:
            batches = []
            for _ in range(num_batches):
                try:
                    batch = next(epoch_iterator)
                except StopIteration:
                    break
                batches.append({key: batch[key] for key in ("input_ids", "labels")})
            return batches, sum((batch["labels"][..., 1:] != -100).sum() for batch in batches)

    return Filters


def counting(base: type) -> type:
    class Counts(in_order(base)):  # type: ignore[misc]
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
            return batches, torch.tensor(sum(batch["labels"].numel() for batch in batches))

    return Counts


def counting_alone(base: type) -> type:
    class CountsAlone(in_order(base)):  # type: ignore[misc]
        def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
            return 3 * super()._get_num_items_in_batch(batch_samples, device)

    return CountsAlone


def dividing(base: type) -> type:
    """With a loss of the script's that divides by the count."""

    class Divides(counting(base)):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
            total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            loss = self.scaled(total / num_items_in_batch)
            return (loss, outputs) if return_outputs else loss

        def scaled(self, loss: Any) -> Any:
            return loss

    return Divides


def completing(base: type) -> type:
    """With a loss that the script multiplies by the number of processes."""

    class Completes(dividing(base)):  # type: ignore[misc]
        def scaled(self, loss: Any) -> Any:
            return loss * self.accelerator.num_processes

    return Completes


def run(kind: type, args: Any, data: list[dict[str, Any]]) -> Any:
    trainer = kind(llama(), args, train_dataset=data)
    trainer.train()
    return trainer


def reported(trainer: Any) -> list[tuple[float, float]]:
    history = trainer.state.log_history
    return [(row["loss"], row["grad_norm"]) for row in history if "grad_norm" in row]


Derive = Callable[[type], type]


@pytest.mark.parametrize(
    "derive", [delegating, noting, filtering, counting, counting_alone, dividing, completing]
)
def test_losses_and_gradients_are_those_of_transformers(tmp_path: Path, derive: Derive) -> None:
    transformers = pytest.importorskip("transformers")
    data = with_names(texts()) if derive is filtering else texts()
    ours = run(derive(Trainer), TrainingArguments(**settings(tmp_path / "ours", **ACCUMULATED)), data)
    args = transformers.TrainingArguments(**settings(tmp_path / "theirs", **ACCUMULATED))
    theirs = run(derive(transformers.Trainer), args, data)
    assert len(reported(ours)) == 8
    for ours_row, theirs_row in zip(reported(ours), reported(theirs), strict=True):
        assert ours_row == pytest.approx(theirs_row, rel=2e-5)
    # The step at each call, too: none is ahead of its update.
    assert ours.notes == theirs.notes
    assert bool(ours.notes) == (derive is noting)


@pytest.mark.parametrize("derive", [delegating, noting])
def test_the_inherited_count_changes_no_bit(tmp_path: Path, derive: Derive) -> None:
    def trained(derive: Derive) -> str:
        folder = tmp_path / derive.__name__
        args = TrainingArguments(**settings(folder, **ACCUMULATED))
        return weights_hash(run(derive(Trainer), args, texts()).model)

    assert trained(derive) == trained(in_order)


def test_a_loss_that_reads_no_count_is_as_without_one(tmp_path: Path) -> None:
    def mean(base: type) -> type:
        class Mean(base):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
                outputs = model(**inputs)
                return (outputs.loss, outputs) if return_outputs else outputs.loss

        return Mean

    def trained(base: type, name: str) -> str:
        args = TrainingArguments(**settings(tmp_path / name, **ACCUMULATED))
        return weights_hash(run(mean(base), args, texts()).model)

    assert trained(counting(Trainer), "counting") == trained(in_order(Trainer), "plain")


def test_a_resumed_run_has_the_same_bits_and_calls(tmp_path: Path) -> None:
    def of(folder: str) -> Any:
        args = TrainingArguments(
            **settings(tmp_path / folder, **ACCUMULATED | {"save_strategy": "steps", "save_steps": 3})
        )
        return counting(noting(Trainer))(llama(), args, train_dataset=texts())

    whole, resumed = of("whole"), of("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert weights_hash(resumed.model) == weights_hash(whole.model)
    assert resumed.notes == whole.notes[3:]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda batches, count: (batches[:1], count), r"a list of 1 for an update of 2 micro-batches"),
        (lambda batches, count: batches, r"returned a list for an update of 2"),
        (lambda batches, count: None, r"returned a NoneType for an update of 2"),
        (lambda batches, count: (batches, float("inf")), r"a count of inf: it is a divisor"),
        (lambda batches, count: (batches, -1), r"a count of -1.0: it is a divisor"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, returned: Any, said: str) -> None:
    class Wrong(Trainer):
        def get_batch_samples(self, *args: Any) -> Any:
            return returned(*super().get_batch_samples(*args))

    args = TrainingArguments(**settings(tmp_path, **ACCUMULATED))
    trainer = Wrong(llama(), args, train_dataset=texts())
    with pytest.raises(DataError, match=said):
        trainer.train()
    assert trainer.state.global_step == 0


def on_two(derive: Derive, folder: str) -> tuple[list[tuple[float, float]], list[Any]]:
    # Five samples an epoch: in its last update a process has none.
    options = ACCUMULATED | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    trainer = run(derive(Trainer), TrainingArguments(**settings(Path(folder), **options)), texts()[:5])
    return reported(trainer), trainer.notes


@pytest.mark.dist
def test_processes_count_together_and_a_filler_counts_nothing(tmp_path: Path) -> None:
    noted, plain = (
        on_ranks(2, on_two, derive, str(tmp_path / derive.__name__)) for derive in (noting, in_order)
    )
    assert [one[0] for one in noted] == [one[0] for one in plain]
    targets = [int((row["labels"][1:] != -100).sum()) for row in texts()[:5]]
    counts = [targets[0] + targets[1], targets[2] + targets[3], targets[4]]
    for _, notes in noted:
        assert [note[-1] for note in notes] == (counts * 3)[:8]


def dropping(base: type) -> type:
    class Drops(in_order(base)):  # type: ignore[misc]
        def get_batch_samples(self, *args: Any) -> Any:
            batches, count = super().get_batch_samples(*args)
            for batch in batches:
                del batch["extra"]
            return batches, count

    return Drops


def with_loaders_of_their_own(base: type) -> type:
    """Process 0 has three batches, process 1 has two."""

    class Loads(base):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            own = self.train_dataset[self.accelerator.process_index :: 2]
            return torch.utils.data.DataLoader(own, batch_size=1, collate_fn=self.data_collator)

    return Loads


def on_two_dealt(derive: Derive, folder: str, kind: type = Trainer) -> list[tuple[float, float]]:
    options = ACCUMULATED | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    data = texts()[:5] if derive is in_order else with_names(texts()[:5])
    return reported(run(derive(kind), TrainingArguments(**settings(Path(folder), **options)), data))


def on_two_uneven(derive: Derive, folder: str) -> list[tuple[float, float]]:
    return on_two_dealt(derive, folder, with_loaders_of_their_own(Trainer))


@pytest.mark.dist
@pytest.mark.parametrize("run_on_two", [on_two_dealt, on_two_uneven])
def test_a_filler_repeats_a_batch_that_was_not_changed(tmp_path: Path, run_on_two: Any) -> None:
    filtered, plain = (
        on_ranks(2, run_on_two, derive, str(tmp_path / derive.__name__)) for derive in (dropping, in_order)
    )
    assert filtered == plain


def refused_on_two(folder: str) -> str:
    with pytest.raises(ModelError) as caught:
        on_two(counting, folder)
    return str(caught.value)


@pytest.mark.dist
def test_a_count_of_the_scripts_own_is_refused_on_several_processes(tmp_path: Path) -> None:
    for said in on_ranks(2, refused_on_two, str(tmp_path)):
        assert "not known if that is a count of one process or of all" in said
