"""A resumed run goes on in its data at once: by position, by the stream's own state, by the loader's own state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from tests.trainer.resume_cases import (
    SAMPLES,
    Case,
    Samples,
    Stream,
    build,
    killed_at_steps,
    run,
    same_run,
    sample,
)
from tests.trainer.small import Net, arguments, rows
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from windlass import Trainer
from windlass.core.errors import CheckpointError

UPDATE = 8


class CountingSamples(Samples):
    reads = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return super().__getitem__(index)


class StatefulStream(Stream):
    def __init__(self) -> None:
        self.at = self.reads = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start, self.at = self.at, 0
        for index in range(start, SAMPLES):
            self.reads += 1
            self.at = index + 1
            yield sample(index)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def hub_stream() -> Any:
    """Random transforms behind a batched map and a filter; another order of the shards in each epoch."""
    indices = datasets.Dataset.from_dict({"index": list(range(SAMPLES))}).to_iterable_dataset(num_shards=3)
    doubled = indices.map(
        lambda rows: {"index": [i for i in rows["index"] for _ in (0, 1)]}, batched=True, batch_size=5
    )
    return doubled.filter(lambda row: row["index"] % 3 != 0).map(lambda row: sample(row["index"]))


class OwnStatefulLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return StatefulDataLoader(self.train_dataset, batch_size=4, shuffle=True)


CASES = {
    "a stream of datasets": Case({"max_steps": 8}, dataset=hub_stream),
    "a stream of datasets, read by workers": Case(
        {"max_steps": 8, "dataloader_num_workers": 2}, dataset=hub_stream
    ),
    "a loader with a state": Case(trainer=OwnStatefulLoader),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "workers" in name else ()) for name in CASES]
)
def test_a_run_killed_at_every_step_ends_with_the_same_bits(name: str, folder: Path) -> None:
    whole = run(folder / "whole", CASES[name])
    killed = killed_at_steps(folder / "killed", CASES[name], range(1, whole.state.global_step + 1))
    same_run(folder / "killed", killed, folder / "whole", whole)


@pytest.mark.parametrize("make", [CountingSamples, StatefulStream])
@pytest.mark.parametrize("step", [1, 4])
def test_no_sample_before_the_position_is_read(make: Any, step: int, folder: Path) -> None:
    case = Case({"max_steps": 5, "save_total_limit": None}, dataset=make)
    run(folder, case)
    resumed = build(folder, case)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert resumed.state.global_step == 5
    assert resumed.train_dataset.reads == SAMPLES - step * UPDATE


@pytest.mark.parametrize(("micro", "accumulation"), [(8, 1), (2, 4)])
def test_a_stream_goes_on_under_another_split(micro: int, accumulation: int, folder: Path) -> None:
    case = Case({"max_steps": 5, "save_total_limit": None}, dataset=StatefulStream)
    run(folder, case)
    resumed = build(folder, case, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert resumed.model.seen == list(range(2 * UPDATE, SAMPLES))
    assert resumed.train_dataset.reads == SAMPLES - 2 * UPDATE


class Restarted(Trainer):
    """Notes the samples of each micro-batch."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.__dict__.setdefault("seen", []).append(inputs["x"].tolist())
        return super().training_step(model, inputs, num_items_in_batch)


class OwnLoader(Restarted):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4)  # type: ignore[arg-type]


class OneStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows(16))


@pytest.mark.parametrize(
    ("kind", "data"), [(Restarted, rows(16)), (Restarted, OneStream()), (OwnLoader, rows(16))]
)
@pytest.mark.parametrize("step", [4, 6])
def test_the_epoch_begins_again_if_that_is_asked_for(
    tmp_path: Path, kind: type[Restarted], data: Any, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Four updates are an epoch: the fourth is its end, and the sixth is in the second."""

    def trained(**options: Any) -> Any:
        resume = options.pop("resume", None)
        args = arguments(tmp_path, max_steps=8, save_strategy="steps", save_steps=2, **options)
        trainer = kind(Net(), args, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == 8
        return trainer.__dict__["seen"]

    whole = trained()
    found = trained(resume=str(tmp_path / f"checkpoint-{step}"), ignore_data_skip=True)
    assert found == whole[4 : 4 + len(found)]
    assert len(found) == 8 - step
    assert ("its first 2 update(s) come twice" in caplog.text) is (step == 6)


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        batch = self.args.per_device_train_batch_size
        return DataLoader(self.train_dataset, batch_size=batch, collate_fn=self.data_collator)


# With updates of the same size the run keeps their number, so it ends within the epoch that it began again.
@pytest.mark.parametrize(("batch", "end"), [(4, 1.75), (2, 2.0)])
@pytest.mark.parametrize("kinds", [(Trainer, OwnLoader), (OwnLoader, Trainer)])
def test_another_kind_of_loader_is_refused_or_begins_the_epoch_again(
    kinds: tuple[type[Trainer], type[Trainer]], batch: int, end: float, tmp_path: Path
) -> None:
    data = rows(32)
    first = {"max_steps": 10, "save_strategy": "steps", "save_steps": 10}
    kinds[0](Net(), arguments(tmp_path, **first), train_dataset=data).train()

    def resume(**changes: Any) -> float:
        args = arguments(
            tmp_path, per_device_train_batch_size=batch, num_train_epochs=2, max_steps=-1, **changes
        )
        resumed = kinds[1](Net(), args, train_dataset=data)
        resumed.train(resume_from_checkpoint=True)
        return resumed.state.epoch

    with pytest.raises(CheckpointError, match=r"another kind of loader.*ignore_data_skip=True"):
        resume()
    assert resume(ignore_data_skip=True) == end
