"""The datasets that an SFTTrainer takes, and what it refuses of them; packed ones train as rows alone do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.trainers import trainer_of

from windlass import SFTTrainer
from windlass.core.errors import ConfigError, DataError
from windlass.text.forms import LocatedRows

pytest.importorskip("transformers")
pytest.importorskip("datasets")


@pytest.mark.parametrize("packing", [False, True])
def test_packed_evaluation_data_has_the_loss_of_the_same_rows_alone(tmp_path: Path, packing: bool) -> None:
    def loss(**changes: Any) -> float:
        rows = small.table(small.texts())
        trainer = trainer_of(tmp_path, small.texts(), eval_dataset=rows, packing=packing, **changes)
        return float(trainer.evaluate()["eval_loss"])

    assert loss(eval_packing=True) == pytest.approx(loss(eval_packing=False), rel=1e-6)


@pytest.mark.parametrize("kind", ["table", "generator"])
def test_a_packed_stream_is_resumed_exactly(tmp_path: Path, kind: str) -> None:
    """In the middle of a group of rows that were packed together."""
    import datasets

    def stream() -> Any:
        if kind == "table":
            return small.table(small.texts(60)).to_iterable_dataset()
        return datasets.IterableDataset.from_generator(lambda: iter(small.texts(60)))

    def trainer(name: str, **changes: Any) -> SFTTrainer:
        options = {
            "packing": True,
            "max_length": 24,
            "per_device_train_batch_size": 2,
            "max_steps": 7,
            **changes,
        }
        return trainer_of(tmp_path / name, stream(), **options)

    whole = trainer("whole")
    whole.train()
    trainer("cut", save_strategy="steps", save_steps=4).train()
    resumed = trainer("cut")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert resumed.state.log_history[-1]["step"] == 7
    for name, weight in resumed.model.named_parameters():
        assert torch.equal(weight, whole.model.get_parameter(name)), name


def test_a_token_that_the_model_does_not_know_is_found_before_training(tmp_path: Path) -> None:
    known = [{"input_ids": [3, 35, 5]}] * 4
    trainer = trainer_of(tmp_path, known)
    unknown = small.table([{"input_ids": [3, 36, 5]}] * 4)
    with pytest.raises(
        DataError, match=r"the eval dataset has the token 36, and the embedding .* has 36 rows"
    ):
        trainer.evaluate(unknown)
    labelled = [{"input_ids": [3, 35, 5], "labels": [-100, 36, 5]}] * 4
    with pytest.raises(DataError, match="the train dataset has the token 36"):
        trainer_of(tmp_path, labelled)
    stream = small.table(labelled).to_iterable_dataset()
    with pytest.raises(
        DataError, match="column 'labels', row 0 of the training set: the label 36 is outside"
    ):
        trainer_of(tmp_path, stream).train()


def test_images_and_rows_without_numbers_are_refused(tmp_path: Path) -> None:
    images = small.table([{**row, "image": 1} for row in small.texts(3)])
    for datasets in ((images, None), (small.texts(3), images)):
        with pytest.raises(ConfigError, match=r"the dataset has images, which need a processor"):
            trainer_of(tmp_path, datasets[0], eval_dataset=datasets[1])
    with pytest.raises(DataError, match="the b dataset: the dataset has no rows"):
        trainer_of(tmp_path, small.texts(3), eval_dataset={"a": small.texts(3), "b": []})
    with pytest.raises(DataError, match="the train dataset: rows of a generator have no numbers"):
        trainer_of(tmp_path, (row for row in small.texts(3)))


def test_a_dataset_of_torch_is_a_sequence_of_rows(tmp_path: Path) -> None:
    class Texts(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return small.texts(5)[index]

    found = trainer_of(tmp_path, Texts()).train_dataset
    assert list(found) == list(trainer_of(tmp_path, small.texts(5)).train_dataset)


def test_shuffled_lists_are_packed_like_tables(tmp_path: Path) -> None:
    given = (small.table(small.texts(40)), tuple(small.texts(40)))
    rows, table = (
        list(trainer_of(tmp_path, data, packing=True, shuffle_dataset=True).train_dataset) for data in given
    )
    assert rows == table


def test_a_function_that_tokenized_rows_ignore_does_not_change_their_labels(tmp_path: Path) -> None:
    rows = small.table([{"input_ids": [3, 7, 8, 9], "completion_mask": [0, 0, 1, 1]}] * 4)
    found = [
        list(trainer_of(tmp_path, rows, formatting_func=function).train_dataset) for function in (None, str)
    ]
    assert found[0] == found[1] == [{"input_ids": [3, 7, 8, 9], "labels": [3, 7, 8, 9]}] * 4


def test_a_prompt_that_fills_the_window_is_named_by_its_line(tmp_path: Path) -> None:
    rows = small.prompts(4)
    rows[2] = {"prompt": " ".join(["cat"] * 40), "completion": " mat"}
    located = LocatedRows(rows, [f"rows.jsonl:{line}" for line in range(1, 5)])
    with pytest.raises(
        DataError, match=r"rows.jsonl:3: the prompt has 40 tokens.* 32 positions.*max_length=32"
    ):
        trainer_of(tmp_path, located, model=small.config(max_position_embeddings=32))


def test_rows_that_are_left_out_or_too_long_are_named_by_their_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = small.prompts(5)
    rows[1] = {"prompt": " ".join(["cat"] * 40), "completion": " mat"}
    rows[3] = {"prompt": "the cat", "completion": " sat" * 25}
    located = LocatedRows(rows, [f"rows.jsonl:{line}" for line in range(1, 6)])
    trainer_of(tmp_path, located, model=small.config(max_position_embeddings=20), max_length=30)
    assert "dropped 1 of 5 rows, which have no token to train on: rows.jsonl:2" in caplog.text
    assert "longest row of the train dataset (rows.jsonl:4) has 28 tokens" in caplog.text
