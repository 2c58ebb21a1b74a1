from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import Net, arguments, token_rows

from windlass import DataError, Trainer, default_data_collator
from windlass.trainer.column_checks import check_columns, given_datasets

pytest.importorskip("transformers")

from tests.trainer.small import bert


def check(data: Any, collator: Any = default_data_collator, **sets: Any) -> None:
    check_columns({"training": data, **sets}, collator, bert(labels=2), ["labels"])


def labelled(*labels: Any, name: str = "labels") -> list[dict[str, Any]]:
    return [{"input_ids": [1, 2], name: label} for label in labels]


@pytest.mark.parametrize("name", ["label", "labels"])
@pytest.mark.parametrize("label", [2, -1, torch.tensor(2)])
def test_a_label_outside_the_classes_is_named_by_its_row(name: str, label: Any) -> None:
    first = torch.tensor(0) if isinstance(label, torch.Tensor) else 0
    with pytest.raises(DataError, match=rf"{name!r}, row 2 of the training set: the label {int(label)} "):
        check(labelled(first, first, label, name=name))


def test_a_table_is_read_in_the_order_of_its_rows() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(labelled(0, 5, 1, 1))
    with pytest.raises(DataError, match="row 1 of the training set: the label 5 "):
        check(table.select([2, 1, 0]))
    check(table.select([2, 0]))
    check(datasets.Dataset.from_list(labelled(0, None, 1)))


def test_tokens_and_lengths_of_a_table_are_read_in_the_order_of_its_rows() -> None:
    datasets = pytest.importorskip("datasets")
    ids = [[1, 2], [], [3], [4, 5, 20], [-1]]
    table = datasets.Dataset.from_dict({"input_ids": ids, "labels": [0] * 5})
    with pytest.raises(DataError, match="row 3 of the training set: the token 20 is outside"):
        check(table)
    with pytest.raises(DataError, match="row 1 of the training set: the token -1 is outside"):
        check(table.select([1, 4, 3]))
    check(table.select([0, 1, 2]))
    long = datasets.Dataset.from_dict({"input_ids": [[1] * 16, [1] * 17], "labels": [0, 0]})
    with pytest.raises(
        DataError, match="row 1 of the training set: 17 tokens, and the model has 16 positions"
    ):
        check(long.with_format("torch"))


def test_good_labels_pass() -> None:
    check(labelled(0, 1, -100, None))
    check(labelled(0.5, 1.5))
    check(labelled([0, 1], [7, 8]))
    check([])
    check(None)
    check([(torch.zeros(2), 7)])


def test_words_are_refused_only_where_they_would_be_labels() -> None:
    with pytest.raises(DataError, match=r"'labels' .* words .*'good'"):
        check(labelled("good"))
    check_columns({"training": [{"x": 1.0, "target": "good"}]}, default_data_collator, Net(), ["target"])


def test_evaluation_sets_are_looked_at_by_name() -> None:
    sets = given_datasets(labelled(0), {"short": labelled(0), "long": labelled(3)}, ())
    with pytest.raises(DataError, match="row 0 of the long evaluation set: the label 3"):
        check_columns(sets, default_data_collator, bert(labels=2), ["labels"])


def test_what_a_script_computes_itself_is_not_looked_at(tmp_path: Path) -> None:
    check(labelled(7), collator=lambda samples: samples)
    assert given_datasets(labelled(7), labelled(8), {"get_train_dataloader", "evaluate"}) == {}

    class Shifted(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            loss = model(input_ids=inputs["input_ids"], labels=inputs["labels"] - 1).loss
            return (loss, None) if return_outputs else loss

    samples = [{**row, "labels": row["labels"] + 1} for row in token_rows(8)]
    Shifted(bert(labels=2), arguments(tmp_path), train_dataset=samples).train()


def test_an_odd_dataset_is_left_to_the_run() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"text": "a film", "labels": 1}])
    table.set_transform(
        lambda batch: {"input_ids": [[1, 2]] * len(batch["labels"]), "labels": batch["labels"]}
    )
    check(table)
    check(datasets.Dataset.from_list(labelled(7)).to_iterable_dataset())
    check({"input_ids": [[1, 2]], "labels": [7]})
