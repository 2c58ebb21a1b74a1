"""Packing data sets: no token is lost, borders are right, and the rows are those of the field's own function."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.errors import ConfigError, DataError
from windlass.text.packing import STRATEGIES, best_fit_decreasing, pack_dataset

EXAMPLES = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]


def _rows(lengths: list[int]) -> list[dict[str, list[int]]]:
    starts = np.cumsum([0, *lengths]).tolist()
    return [{"input_ids": [*range(a, b)], "labels": [*range(a, b)]} for a, b in pairwise(starts)]


def _one_by_one(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing by its definition."""
    rows: list[list[int]] = []
    spaces: list[int] = []
    emptied: list[int] = []  # when a row got its present space: ties go to the oldest
    for clock, document in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        fitting = [r for r in range(len(rows)) if spaces[r] >= lengths[document]]
        if not fitting:
            rows.append([])
            spaces.append(capacity)
            emptied.append(clock)
            fitting = [len(rows) - 1]
        row = min(fitting, key=lambda r: (spaces[r], emptied[r]))
        rows[row].append(document)
        spaces[row] -= lengths[document]
        emptied[row] = clock
    return rows


@given(st.lists(st.integers(1, 12), max_size=60), st.integers(12, 20))
def test_best_fit_is_that_of_the_definition(lengths: list[int], capacity: int) -> None:
    order, starts = best_fit_decreasing(lengths, capacity)
    rows = [order[a:b].tolist() for a, b in pairwise(starts)]
    assert rows == _one_by_one(lengths, capacity)


@pytest.mark.parametrize(
    "bad",
    [
        {"seq_length": "8"},
        {"seq_length": 8.0},
        {"map_kwargs": 3},
        {"dataset": None},
        {"dataset": "rows.jsonl"},
    ],
)
def test_arguments_of_another_type_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        pack_dataset(**{"dataset": _rows([2]), "seq_length": 8, **bad})


def test_lengths_beyond_a_row_are_refused() -> None:
    with pytest.raises(ValueError, match="from 1 to 8"):
        best_fit_decreasing([3, 9], 8)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(4, 16))
def test_nothing_is_lost(lengths: list[int], seq_length: int) -> None:
    rows = _rows(lengths)
    split = pack_dataset(rows, seq_length, "bfd_split")
    assert sorted(t for row in split for t in row["input_ids"]) == [*range(sum(lengths))]
    cut = pack_dataset(rows, seq_length, "bfd")
    assert sorted(t for row in cut for t in row["input_ids"]) == [
        t for r in rows for t in r["input_ids"][:seq_length]
    ]
    wrapped = pack_dataset(rows, seq_length, "wrapped")
    assert [t for row in wrapped for t in row["input_ids"]] == [*range(sum(lengths))]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(4, 16))
def test_borders_enclose_pieces_of_one_document(lengths: list[int], seq_length: int) -> None:
    rows = _rows(lengths)
    document_of = {t: number for number, row in enumerate(rows) for t in row["input_ids"]}
    for row in pack_dataset(rows, seq_length, "bfd_split"):
        assert row["labels"] == row["input_ids"]
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) <= seq_length
        end = 0
        for size in row["seq_lengths"]:
            piece = row["input_ids"][end : end + size]
            assert piece == [*range(piece[0], piece[0] + size)]
            assert len({document_of[token] for token in piece}) == 1
            end += size


def test_a_list_of_rows() -> None:
    rows = [{"input_ids": ids} for ids in EXAMPLES]
    packed = pack_dataset(rows, 4)
    assert [row["input_ids"] for row in packed] == [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]]
    assert [row["seq_lengths"] for row in packed] == [[4], [3, 1], [2]]
    assert pack_dataset([], 4) == []
    for other in ({"input_ids": [1], "labels": [1]}, {"labels": [1]}):
        with pytest.raises(DataError, match=r"row 1 has the columns .*labels.*, and row 0 has input_ids"):
            pack_dataset([{"input_ids": [1]}, other], 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("batch_size", [1000, 7, None])
def test_rows_are_those_of_trl(strategy: str, batch_size: int | None) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl.data_utils")
    lengths = np.random.default_rng(0).integers(0, 40, 50).tolist()
    dataset = datasets.Dataset.from_list(_rows(lengths))
    options = {"batch_size": batch_size}
    assert (
        pack_dataset(dataset, 16, strategy, options)[:] == trl.pack_dataset(dataset, 16, strategy, options)[:]
    )


def _kinds(datasets: Any) -> dict[str, Any]:
    dataset = datasets.Dataset.from_dict({"input_ids": EXAMPLES})
    stream = dataset.to_iterable_dataset()
    return {
        "numpy": dataset.with_format("numpy"),
        "columns": dataset.with_format("torch", columns=["input_ids"]),
        "several": datasets.DatasetDict({"train": dataset, "test": dataset}),
        "stream": stream,
        "numpy stream": stream.with_format("numpy"),
        "large lists": dataset.cast(
            datasets.Features({"input_ids": datasets.LargeList(datasets.Value("int64"))})
        ),
    }


@pytest.mark.parametrize("kind", ["numpy", "columns", "several", "stream", "numpy stream", "large lists"])
def test_kind_and_format_are_those_of_trl(kind: str) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl.data_utils")
    dataset = _kinds(datasets)[kind]
    ours, theirs = (pack(dataset, 4) for pack in (pack_dataset, trl.pack_dataset))
    assert type(ours) is type(theirs)
    if kind == "several":
        ours, theirs = ours["test"], theirs["test"]
    for mine, their in zip(ours, theirs, strict=True):
        assert {k: type(v) for k, v in mine.items()} == {k: type(v) for k, v in their.items()}
        assert {k: [*map(int, v)] for k, v in mine.items()} == {k: [*map(int, v)] for k, v in their.items()}


def test_nothing_is_packed_of_an_empty_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"input_ids": [[1], [2]]})
    packed = pack_dataset(datasets.DatasetDict({"train": dataset.select([]), "test": dataset}), 4)
    assert (len(packed["train"]), packed["test"][:]) == (0, {"input_ids": [[1, 2]], "seq_lengths": [[1, 1]]})
    nulls = pack_dataset(datasets.Dataset.from_dict({"input_ids": [[1], None, [2]]}), 4)
    assert nulls[:] == {"input_ids": [[1, 2]], "seq_lengths": [[1, 1]]}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lists_of_a_fixed_size(strategy: str) -> None:
    datasets = pytest.importorskip("datasets")
    fixed = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"), length=4)})
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 3}, features=fixed)
    packed = pack_dataset(dataset, 8, strategy)
    assert packed["input_ids"][:] == [[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize("form", ["list", "dataset"])
def test_what_cannot_be_packed_is_refused(form: str) -> None:
    def made(rows: list[dict[str, Any]]) -> Any:
        return rows if form == "list" else pytest.importorskip("datasets").Dataset.from_list(rows)

    with pytest.raises(TypeError, match="'text' holds"):
        pack_dataset(made([{"input_ids": [1], "text": "a"}]), 4)
    with pytest.raises(ValueError, match=r"row 1 has 2 values in 'input_ids' and 1 in 'labels'"):
        pack_dataset(made([{"input_ids": [1], "labels": [1]}, {"input_ids": [1, 2], "labels": [1]}]), 4)
    with pytest.raises(ConfigError, match="strategy='bdf'"):
        pack_dataset(made([{"input_ids": [1]}]), 4, "bdf")
    with pytest.raises(ConfigError, match="seq_length=0"):
        pack_dataset(made([{"input_ids": [1]}]), 0)
