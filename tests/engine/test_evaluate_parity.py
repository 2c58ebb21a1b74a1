"""The same predictions and labels, in the same structure, types and padding, as `transformers.Trainer.predict`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.evaluate_cases import evaluation_of

from windlass.engine.evaluate import evaluation_loop
from windlass.metrics.evaluation import ignored_keys, labels_of, split_outputs

transformers = pytest.importorskip("transformers", reason="compares with transformers")
pytest.importorskip("accelerate", reason="transformers' trainer needs it")

Task = tuple[Any, list[dict[str, Any]], list[str], Callable[[Any], Any] | None]


def small_config(labels: int) -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return transformers.BertConfig(vocab_size=12, max_position_embeddings=8, num_labels=labels, **sizes)


def question_answering() -> Task:
    """Two outputs and two labels."""
    ids = torch.arange(8)
    data = [{"input_ids": ids, "start_positions": i % 8, "end_positions": (i + 1) % 8} for i in range(11)]
    model = transformers.BertForQuestionAnswering(small_config(2))
    return model, data, ["start_positions", "end_positions"], None


def token_classification() -> Task:
    """Batches of different widths."""

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(sample["labels"]) for sample in samples)

        def padded(name: str, value: int) -> torch.Tensor:
            return torch.tensor([sample[name] + [value] * (width - len(sample[name])) for sample in samples])

        return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}

    data = [{"input_ids": [1] * (1 + i % 5), "labels": [i % 3] * (1 + i % 5)} for i in range(11)]
    return transformers.BertForTokenClassification(small_config(3)), data, ["labels"], collate


def predict_here(model: Any, loader: Any, names: list[str]) -> Any:
    def step(batch: dict[str, Any]) -> tuple[Any, Any, Any]:
        labels = labels_of(batch, names)
        with torch.no_grad():
            loss, logits = split_outputs(model(**batch), has_loss=True, ignore_keys=ignored_keys(model))
        return loss, logits, labels

    batches = (([], batch) for batch in loader)
    return evaluation_loop(batches, evaluation_of(step, prefix="test", predicting=True))


def assert_same(mine: Any, theirs: Any) -> None:
    assert type(mine) is type(theirs)
    if isinstance(mine, tuple):
        for part, other in zip(mine, theirs, strict=True):
            assert_same(part, other)
    else:
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("task", [question_answering, token_classification])
def test_predictions_and_labels_are_those_of_transformers(task: Callable[[], Task], tmp_path: Path) -> None:
    model, data, names, collate = task()
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=4, label_names=names, use_cpu=True, disable_tqdm=True
    )
    peer = transformers.Trainer(model, args, data_collator=collate)
    theirs = peer.predict(data)
    mine = predict_here(model.eval(), peer.get_eval_dataloader(data), names)
    assert_same(mine.predictions, theirs.predictions)
    assert_same(mine.label_ids, theirs.label_ids)
    assert mine.num_samples == 11
