"""`accelerator_config` on two ranks: who reads, what a batch size means, and when gradients are reduced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch
from tests.trainer.loader_options_ranks import COUNT, UPDATE

from windlass import TrainingArguments
from windlass.core.errors import ConfigError
from windlass.data.bookmark import WITNESSES
from windlass.data.samplers import SeedableRandomSampler

SCRIPT = Path(__file__).with_name("loader_options_ranks.py")
Ranks = list[dict[str, Any]]


def _launched(world: int, folder: Path) -> Ranks:
    launch(world, SCRIPT, folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


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
