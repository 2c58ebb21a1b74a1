from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.data.cases import as_list

from windlass.core.errors import DataError
from windlass.data import columns
from windlass.data.columns import ColumnCollator, select_columns, signature_columns


class Model:
    def forward(
        self, input_ids: Any, mask: Any = None, *rest: Any, labels: Any = None, **more: Any
    ) -> None: ...


class Wrapped:
    def forward(self, *args: Any, **kwargs: Any) -> None: ...

    def get_base_model(self) -> Model:
        return Model()


class TakesAll:
    def forward(self, **inputs: Any) -> None: ...


COLUMNS = ["input_ids", "mask", "labels", "label", "label_ids", "start"]


@pytest.mark.parametrize("model", [Model(), Wrapped()])
def test_names_of_forward_and_of_labels(model: Any) -> None:
    assert signature_columns(model, ["labels", "start"]) == COLUMNS


def test_a_forward_that_takes_anything_keeps_all() -> None:
    assert signature_columns(TakesAll(), ["labels"]) == []
    assert ColumnCollator(as_list, [])([{"x": 1}]) == [{"x": 1}]


def test_one_worker_says_it_for_all(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for worker in range(2):
        monkeypatch.setattr(columns, "get_worker_info", lambda worker=worker: SimpleNamespace(id=worker))
        assert ColumnCollator(as_list, COLUMNS)([{"input_ids": 1, "id": 3}]) == [{"input_ids": 1}]
    assert said.text.count("left out: id") == 1


def test_the_collator_leaves_columns_out_and_says_so_once(said: pytest.LogCaptureFixture) -> None:
    collate = ColumnCollator(as_list, COLUMNS, "evaluation")
    sample = {"input_ids": 1, "text": "a", "label": 0, "id": 3}
    for _ in range(2):
        assert collate([sample, {"input_ids": 2}]) == [{"input_ids": 1, "label": 0}, {"input_ids": 2}]
    assert "text" in sample
    assert said.text.count("left out: text, id") == 1
    assert "evaluation set" in said.text


def test_samples_that_are_no_mappings_pass() -> None:
    assert ColumnCollator(as_list, COLUMNS)([(1, 2)]) == [(1, 2)]


def test_nothing_that_fits_is_an_error_that_names_both_sides() -> None:
    with pytest.raises(
        DataError, match=r"Columns: text, id. The model's forward takes: input_ids, mask"
    ) as caught:
        ColumnCollator(as_list, COLUMNS)([{"text": "a", "id": 1}])
    assert "remove_unused_columns=False" in str(caught.value)


def test_hugging_face_sets_lose_the_columns_themselves() -> None:
    datasets = pytest.importorskip("datasets")
    full = datasets.Dataset.from_dict({"input_ids": [[1]], "text": ["a"], "label": [0]})
    assert select_columns(full, COLUMNS, "training").column_names == ["input_ids", "label"]
    assert select_columns(full, [], "training") is full
    assert select_columns([{"text": "a"}], COLUMNS, "training") == [{"text": "a"}]
    with pytest.raises(DataError, match="Columns: text"):
        select_columns(full.select_columns(["text"]), COLUMNS, "training")
