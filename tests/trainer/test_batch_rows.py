"""The first rows of a run, as its model gets them: of every kind of task, and of streams, which are not read twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small, tiny
from torch.utils.data import IterableDataset

from windlass import Trainer, TrainingArguments
from windlass.callbacks.samples_log import SamplesLog, read_samples
from windlass.trainer.batch_rows import rows_of_batch

IDS = torch.tensor([[6, 7, 8, 1], [9, 10, 0, 0]])  # the cat sat <eos>; on a <pad> <pad>
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def pieces(sample: dict[str, Any]) -> list[tuple[str, bool]]:
    return [(text.strip(), trained) for text, trained in sample["pieces"]]


def rows(batch: dict[str, Any], model: Any = None, **options: Any) -> list[dict[str, Any]]:
    return rows_of_batch(batch, model or small.model(), small.tokenizer(), **options)


def test_of_a_causal_model_the_tokens_with_labels_are_marked() -> None:
    labels = torch.tensor([[-100, 7, 8, 1], [9, 10, -100, -100]])
    first, second = rows({"input_ids": IDS, "attention_mask": MASK, "labels": labels})
    assert pieces(first) == [("the", False), ("cat sat <eos>", True)]
    assert (first["name"], first["tokens"], first["trained"]) == ("first batch, row 0", 4, 3)
    assert (pieces(second), second["tokens"]) == ([("on a", True)], 2), "padding is left out"


def test_of_a_masked_model_what_is_to_be_found_is_beside_the_mask() -> None:
    labels = torch.tensor([[-100, 11, -100, -100], [-100] * 4])
    first, second = rows({"input_ids": IDS, "attention_mask": MASK, "labels": labels})
    assert pieces(first) == [("the", False), ("cat → mat", True), ("sat <eos>", False)]
    assert second["trained"] == 0


def test_classes_of_tokens_are_not_read_as_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForTokenClassification(
        transformers.BertConfig(
            vocab_size=36, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
    )
    labels = torch.tensor([[0, 1, 0, -100], [1, 1, -100, -100]])
    assert pieces(rows({"input_ids": IDS, "labels": labels}, model)[0]) == [
        ("the cat sat", True),
        ("<eos>", False),
    ]


def test_a_text_has_its_class_or_its_number() -> None:
    model = small.model(id2label={0: "bad", 1: "good"})
    found = rows({"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([1, 0])}, model)
    assert [one["label"] for one in found] == ["good", "bad"]
    assert pieces(found[0]) == [("the cat sat <eos>", False)]
    numbers = rows({"input_ids": IDS, "labels": torch.tensor([0.25, 3.0])}, model)
    assert [one["label"] for one in numbers] == ["0.25", "3"]


def test_of_an_encoder_and_decoder_the_answer_is_marked() -> None:
    labels = torch.tensor([[11, 1, -100, -100], [12, 13, 14, 1]])
    first, second = rows({"input_ids": IDS, "attention_mask": MASK, "labels": labels}, tiny.encoder_decoder())
    assert pieces(first) == [("the cat sat <eos>", False), ("mat <eos>", True)]
    assert (second["tokens"], second["trained"]) == (6, 4)


def test_pairs_are_side_by_side() -> None:
    answers = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]])
    batch = {"input_ids": IDS, "attention_mask": MASK, "completion_mask": answers}
    chosen, rejected = rows(batch, pairs=True)
    assert (chosen["name"], pieces(chosen)) == (
        "first batch, row 0, chosen",
        [("the", False), ("cat sat <eos>", True)],
    )
    assert (rejected["name"], pieces(rejected)) == (
        "first batch, row 0, rejected",
        [("on", False), ("a", True)],
    )


def test_an_image_has_a_place_in_the_text_or_a_size() -> None:
    tokenizer = small.tokenizer()
    tokenizer.image_token_id = 7
    ids = torch.tensor([[6] + [7] * 20 + [8, 1]])
    labels = ids.clone()
    labels[:, :-2] = -100
    (found,) = rows_of_batch({"input_ids": ids, "labels": labels}, small.model(), tokenizer)
    assert pieces(found) == [("the[image: 20 tokens]", False), ("sat <eos>", True)]
    images = {"pixel_values": torch.zeros(5, 3, 4, 6), "labels": torch.tensor([2, 0, 1, 0, 0])}
    alone = rows_of_batch(images, torch.nn.Linear(1, 1), None)
    assert [(one["pieces"], one["label"]) for one in alone] == [
        ([["[image 3 x 4 x 6]", False]], label) for label in "201"
    ]


def test_what_is_not_known_has_no_rows() -> None:
    assert rows_of_batch((IDS,), small.model(), small.tokenizer()) == []
    assert rows_of_batch({"x": torch.zeros(2, 3), "labels": torch.zeros(2)}, small.model(), None) == []
    assert rows_of_batch({"input_ids": IDS, "labels": IDS}, small.model(), None) == []


class Stream(IterableDataset[dict[str, Any]]):
    """Counts how often each row is read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(20):
            self.read.append(number)
            ids = torch.tensor([6 + number % 20, 7, 1])
            yield {"input_ids": ids, "labels": ids}


def run(folder: Path, *, keeps: bool = True) -> tuple[list[int], list[float]]:
    stream = Stream()
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, logging_steps=1, use_cpu=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(small.model(), args, train_dataset=stream, processing_class=small.tokenizer())
    if not keeps:
        trainer.remove_callback(SamplesLog)
    trainer.train()
    return stream.read, [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_a_stream_shows_its_first_rows_and_is_read_as_without_them(tmp_path: Path) -> None:
    assert run(tmp_path / "kept") == run(tmp_path / "plain", keeps=False)
    assert [pieces(one) for one in read_samples(tmp_path / "kept")] == [
        [(f"{word} cat <eos>", True)] for word in ("the", "cat", "sat")
    ]
    assert not read_samples(tmp_path / "plain")
