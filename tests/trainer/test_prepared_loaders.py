"""A `DataLoader` that is given to `trainer.accelerator.prepare` is dealt to the ranks like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch
from tests.trainer.prepared_loader_ranks import EVALUATED, TRAINED

SCRIPT = Path(__file__).with_name("prepared_loader_ranks.py")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _launched(1, tmp_path_factory.mktemp("one"))[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _launched(2, tmp_path_factory.mktemp("two"))


def _launched(world: int, folder: Path) -> list[dict[str, Any]]:
    launch(world, SCRIPT, folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


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
def test_an_evaluation_that_fails_on_one_rank_ends_on_all(two: list[dict[str, Any]]) -> None:
    others, failing = (rank["failed"] for rank in two)
    assert failing == [["OSError", "bad batch"]] * 8
    assert [kind for kind, _ in others] == ["PeerError"] * 8
    assert all("rank 1: OSError: bad batch" in words for _, words in others)
