"""The first difference of two records, and the sentence that explains it."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from windlass.cli.compare_command import (
    ScriptRecord,
    differences,
    farthest_weight,
    reason,
    same_rows_otherwise,
)


def record(folder: Path, *changes: dict[str, Any], weight: float = 0.0) -> ScriptRecord:
    """Three equal updates, the last of which have the changes."""
    folder.mkdir()
    save_file({"layer.weight": torch.tensor([1.0, 2.0 + weight])}, folder / "weights.safetensors")
    same: dict[str, Any] = {
        "rows": [["a", "b"]],
        "rates": [0.1],
        "loss": 2.0,
        "norm": 3.0,
        "digests": {"layer.weight": "0"},
        "seconds": 1.0,
        "pause": None,
    }
    updates = [dict(same) for _ in range(3)]
    for update, change in zip(updates[3 - len(changes) :], changes, strict=True):
        update.update(change)
    return ScriptRecord(updates, memory=1, unread=[], weights=folder / "weights.safetensors")


def explained(tmp_path: Path, *changes: dict[str, Any]) -> str:
    own, ours = record(tmp_path / "own"), record(tmp_path / "ours", *changes)
    return reason(differences(own, ours), same_rows_otherwise(own, ours))


def test_equal_records_have_no_difference(tmp_path: Path) -> None:
    assert explained(tmp_path) == "same bits in every update"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ([{"rates": [0.2], "loss": 9.0}], "from update 3 the learning rate differs ([0.1] and [0.2])"),
        ([{"loss": 2.0 + 1e-7}, {"loss": 9.0}], "from update 2 the loss differs by rounding"),
        ([{"loss": 4.0, "norm": 6.0}], "from update 3 the loss differs by a factor of 2 although rows and weights"),
        ([{"norm": 1.5}], "from update 3 the gradient norm differs by a factor of 0.5 although rows, weights and loss"),
        ([{"digests": {"layer.weight": "1"}}, {"norm": 9.0}], "from update 2 the weights differ by rounding"),
        ([{"rows": [["b"], ["a"]]}], "from update 3 the same rows come in another order or in other batches"),
        ([{"rows": [["a", "c"]]}], "from update 3 the model gets other rows"),
    ],
)  # fmt: skip
def test_the_first_difference_is_explained_by_what_is_equal_before_it(
    tmp_path: Path, changes: list[dict[str, Any]], sentence: str
) -> None:
    assert explained(tmp_path, *changes).startswith(sentence)


def test_rows_that_were_not_seen_are_not_called_the_same(tmp_path: Path) -> None:
    unseen = {"rows": [[]]}
    own = record(tmp_path / "own", unseen, unseen, unseen)
    ours = record(tmp_path / "ours", unseen, unseen, {**unseen, "loss": 4.0})
    assert (own.sees_rows, record(tmp_path / "seen").sees_rows) == (False, True)
    said = reason(differences(own, ours), same_rows_otherwise(own, ours), own.sees_rows)
    assert said.startswith("from update 3 the loss differs by a factor of 2; the rows are not known")


def test_weights_are_the_same_in_whatever_order_the_optimizer_has_them(tmp_path: Path) -> None:
    own = record(tmp_path / "own", {"digests": {"a": "0", "b": "1"}})
    assert not differences(own, record(tmp_path / "ours", {"digests": {"b": "1", "a": "0"}}))


def test_each_quantity_has_its_first_difference(tmp_path: Path) -> None:
    own = record(tmp_path / "own")
    ours = record(tmp_path / "ours", {"norm": 9.0}, {"loss": 9.0, "norm": 8.0})
    assert {name: one.update for name, one in differences(own, ours).items()} == {"norm": 2, "loss": 3}


def test_the_parameter_that_differs_most_is_named(tmp_path: Path) -> None:
    own = record(tmp_path / "own")
    assert farthest_weight(own, record(tmp_path / "same")) is None
    assert farthest_weight(own, record(tmp_path / "other", weight=0.5)) == ("layer.weight", 0.5)


def test_times_are_those_of_the_fastest_update_after_the_first(tmp_path: Path) -> None:
    changes = [
        {"seconds": 0.1, "pause": None},
        {"seconds": 0.7, "pause": 2.0},
        {"seconds": 0.4, "pause": 5.0},
    ]
    found = record(tmp_path / "own", *changes)
    assert found.seconds == 0.4
    assert found.pause == 5.0


@pytest.mark.parametrize(
    ("own", "ours", "most"),
    [(nan, nan, None), (inf, inf, None), (nan, 1.0, inf), (1.0, inf, inf), (1.0, 1.5, 0.5)],
)
def test_values_that_are_not_finite_are_compared(
    own: float, ours: float, most: float | None, tmp_path: Path
) -> None:
    records = (record(tmp_path / "own", weight=own), record(tmp_path / "ours", weight=ours))
    assert farthest_weight(*records) == (None if most is None else ("layer.weight", most))
