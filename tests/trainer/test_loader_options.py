"""`accelerator_config` on two ranks: who reads, what a batch size means, and when gradients are reduced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.test_losses import samples, trainer_for
from torch.utils.data import DataLoader, IterableDataset

from windlass import Trainer, TrainingArguments
from windlass.core.errors import ConfigError
from windlass.data.bookmark import WITNESSES
from windlass.data.samplers import SeedableRandomSampler

Ranks = list[dict[str, Any]]


def _launched(world: int, folder: Path) -> Ranks:
    return on_ranks(world, main, folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _launched(1, tmp_path_factory.mktemp("one"))[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return _launched(2, tmp_path_factory.mktemp("two"))


KINDS = ["dispatched", "resumed", "dispatched map", "split", "each", "each sharded"]


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_that_of_one_process(kind: str, one: dict[str, Any], two: Ranks) -> None:
    # Streams come in their own order.
    alone = one["dispatched" if kind in ("dispatched", "resumed") else "plain"]
    for rank in two:
        found = rank[kind]
        assert found["steps"] == alone["steps"] == 6
        for mine, expected in zip(found["weights"], alone["weights"], strict=True):
            assert mine == pytest.approx(expected, rel=1e-12)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12)
        assert found["labels"] == [i % 2 for i in range(9)]


@pytest.mark.dist
def test_the_main_process_alone_reads_a_stream(two: Ranks) -> None:
    main, other = (rank["dispatched"] for rank in two)
    assert main["read"] >= 2 * COUNT
    assert other["read"] <= WITNESSES
    assert sum(size for size, _ in main["seen"]) + sum(size for size, _ in other["seen"]) >= 2 * COUNT


@pytest.mark.dist
def test_a_resumed_run_has_the_same_bits(two: Ranks) -> None:
    for rank in two:
        assert rank["resumed"]["weights"] == rank["dispatched"]["weights"]


@pytest.mark.dist
def test_a_split_batch_is_that_of_all_processes(one: dict[str, Any], two: Ranks) -> None:
    assert one["split"]["size"] == UPDATE
    for rank in two:
        assert rank["split"]["size"] == UPDATE, (
            "what a loader gets, which `prepare` divides among the processes"
        )
        assert max(size for size, _ in rank["split"]["seen"]) == UPDATE // 2
        assert rank["split"]["weights"] == rank["plain"]["weights"]


@pytest.mark.dist
def test_gradients_are_reduced_in_each_micro_batch(two: Ranks) -> None:
    for rank in two:
        assert not all(reduces for _, reduces in rank["plain"]["seen"])
        assert all(reduces for _, reduces in rank["each"]["seen"])


def test_a_batch_that_the_processes_do_not_divide_is_refused() -> None:
    args = TrainingArguments("out", per_device_train_batch_size=6, accelerator_config={"split_batches": True})
    assert args.train_batch_size_of(3) == 2
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size=6: .*4 do not divide it"):
        args.train_batch_size_of(4)


def _order(seed: int) -> list[int]:
    """The first pass over 16 samples as accelerate shuffles them."""
    return list(SeedableRandomSampler(range(16), data_seed=seed))


@pytest.mark.dist
def test_what_a_trainers_accelerator_prepares_has_the_same_options(two: Ranks) -> None:
    for number, rank in enumerate(two):
        found = {kind.removeprefix("prepared "): rank[kind] for kind in rank if kind.startswith("prepared")}
        plain, split, others = found["prepared"], found["split"], found["others"]
        assert [len(batch) for batch in plain["batches"]] == [4, 4]
        assert [len(batch) for batch in split["batches"]] == [2, 2, 2, 2]
        order = _order(42)
        assert plain["batches"] == [order[4 * (2 * i + number) :][:4] for i in range(2)]
        assert split["batches"] == [order[4 * i + 2 * number :][:2] for i in range(4)]
        order = _order(7)
        assert others["batches"] == [order[4 * (2 * i + number) :][:4] for i in range(2)]
        assert found["unseeded"]["batches"] != plain["batches"]
        assert (plain["even"], others["even"]) == (True, False)
        assert (plain["non_blocking"], others["non_blocking"]) == (False, True)
        assert (plain["reduces"], found["each"]["reduces"]) == ([False, True], [True, True])
    main, other = (rank["prepared dispatched"]["read"] for rank in two)
    assert main >= 16
    assert other <= WITNESSES


# --- what each rank runs ----------------------------------------------------------------------------------------------


WORLD = int(os.environ.get("WORLD_SIZE", "1"))
COUNT, UPDATE = 23, 4  # samples; those of a micro-batch over all ranks


class Counted(IterableDataset[Any]):
    """Counts the samples that were read."""

    def __init__(self, count: int = COUNT) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Any:
        for row in samples(self.count):
            self.read += 1
            yield row

    def __len__(self) -> int:
        return self.count


class Noting(Trainer):
    """Notes for each micro-batch how many samples it has, and if its backward reduces gradients."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        seen = self.__dict__.setdefault("seen", [])
        seen.append([len(inputs["x"]), bool(getattr(model, "require_backward_grad_sync", True))])
        return super().training_step(model, inputs, num_items_in_batch)


def whole(tensor: Any) -> torch.Tensor:
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def trained(
    folder: Path, data: Any, config: dict[str, Any], resume: str | None = None, **options: Any
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "logging_steps": 1,
        "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": UPDATE // WORLD,
        "per_device_eval_batch_size": 2, "accelerator_config": config, **options,
    }  # fmt: skip
    trainer = trainer_for(
        folder, Noting, data=data, eval_dataset=Counted(9), compute_metrics=lambda p: {"labels": p.label_ids.tolist()},
        **settings,
    )  # fmt: skip
    trainer.model.double()
    trainer.train(resume_from_checkpoint=resume)
    read = getattr(data, "read", 0)
    metrics = trainer.evaluate()
    return {
        "weights": [whole(p.detach()).flatten().tolist() for p in trainer.model.parameters()],
        "steps": trainer.state.global_step,
        "seen": trainer.__dict__["seen"],
        "read": read,
        "loss": metrics["eval_loss"],
        "labels": metrics["eval_labels"],
        "size": trainer.args.train_batch_size,
    }


def prepared(folder: Path, config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What a loader is that the Trainer's accelerator prepares, and a second model that it accumulates."""
    trainer = trainer_for(
        folder,
        accelerator_config=config,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        **options,
    )
    accelerator, stream = trainer.accelerator, Counted(16)
    size = trainer._train_batch_size
    loader = accelerator.prepare(DataLoader(list(range(16)), batch_size=size, shuffle=True))  # type: ignore[arg-type]
    batches = [batch.tolist() for batch in loader]
    list(accelerator.prepare(DataLoader(stream, batch_size=2)))
    second = accelerator.prepare(torch.nn.Linear(2, 1))
    reduces = []
    for _ in range(2):
        with accelerator.accumulate(second):
            reduces.append(bool(getattr(second, "require_backward_grad_sync", True)))
    return {
        "batches": batches, "read": stream.read, "reduces": reduces, "even": accelerator.even_batches,
        "non_blocking": accelerator.non_blocking,
    }  # fmt: skip


def main(folder: Path) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    dispatch, split = {"dispatch_batches": True}, {"split_batches": True}
    each = {"gradient_accumulation_kwargs": {"sync_each_batch": True, "sync_with_dataloader": False}}
    found = {
        "plain": trained(folder / "plain", samples(COUNT), {}),
        "dispatched": trained(folder / "dispatched", Counted(), dispatch),
        "resumed": trained(folder / "resumed", Counted(), dispatch, str(folder / "dispatched" / "checkpoint-2")),
        "dispatched map": trained(folder / "map", samples(COUNT), dispatch),
        "split": trained(
            folder / "split", samples(COUNT), split, per_device_train_batch_size=UPDATE, per_device_eval_batch_size=4
        ),
        "each": trained(folder / "each", samples(COUNT), each),
        "each sharded": trained(folder / "sharded", samples(COUNT), each, fsdp=WORLD > 1),
    }  # fmt: skip
    found |= {
        "prepared": prepared(folder, {}),
        "prepared split": prepared(folder, split),
        "prepared dispatched": prepared(folder, dispatch),
        "prepared each": prepared(folder, each),
        "prepared others": prepared(folder, {"even_batches": False, "non_blocking": True}, data_seed=7),
        "prepared unseeded": prepared(folder, {"use_seedable_sampler": False}),
    }
    torch.set_default_dtype(torch.float32)
    return found
