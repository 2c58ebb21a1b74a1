"""`predict`: every sample once, in order, in the structure of the model's output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer


@settings(max_examples=25)
@given(count=st.integers(1, 23), size=st.integers(1, 9))
def test_every_sample_once_in_order(tmp_path_factory: Any, count: int, size: int) -> None:
    folder = tmp_path_factory.getbasetemp() / "predict"
    trainer = Trainer(Net(), arguments(folder, per_device_eval_batch_size=size))
    data = rows(count)
    output = trainer.predict(data)
    with torch.no_grad():
        expected = trainer.model(torch.stack([row["x"] for row in data]))["logits"]
    np.testing.assert_allclose(output.predictions, expected.numpy(), rtol=1e-4, atol=1e-6)
    assert output.label_ids.tolist() == [row["labels"] for row in data]


def test_data_without_labels(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path), compute_metrics=lambda p: {"never": 1.0})
    output = trainer.predict([{"x": row["x"]} for row in rows(5)])
    assert output.predictions.shape == (5, 3)
    assert output.label_ids is None
    assert not {"test_loss", "test_never"} & set(output.metrics)
    assert output.metrics["test_samples_per_second"] > 0


def test_prefix_and_metrics(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path), compute_metrics=lambda p: {"rows": len(p.predictions)})
    metrics = trainer.predict(rows(6), metric_key_prefix="final").metrics
    assert metrics["final_rows"] == 6
    assert {"final_loss", "final_runtime", "final_samples_per_second", "final_steps_per_second"} <= set(
        metrics
    )


class Several(Net):
    """Nested outputs, one of them of a width that follows the batch, and a cache that is not a prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"keys_to_ignore_at_inference": ["cache"]})()

    def forward(self, x: Any, labels: Any = None) -> Any:
        made = super().forward(x, labels)
        width = 2 + int(x.shape[0])
        return {**made, "pair": (x, x * 2), "wide": torch.ones(len(x), width), "cache": x}


def test_nested_and_ragged_outputs(tmp_path: Path) -> None:
    trainer = Trainer(Several(), arguments(tmp_path, per_device_eval_batch_size=4))
    logits, pair, wide = trainer.predict(rows(6)).predictions
    assert logits.shape == (6, 3)
    np.testing.assert_allclose(pair[1], 2 * pair[0])
    assert wide.shape == (6, 6)
    assert (wide[4:, 4:] == -100).all()
    assert (wide[:4] == 1).all()
    logits, wide = trainer.predict(rows(6), ignore_keys=["pair", "cache"]).predictions
    assert wide.shape == (6, 6)


def test_batches_may_be_kept_apart(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path, eval_do_concat_batches=False, eval_accumulation_steps=1))
    output = trainer.predict(rows(10))
    assert [len(part) for part in output.predictions] == [4, 4, 2]
    assert [len(part) for part in output.label_ids] == [4, 4, 2]


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_the_loss_is_no_prediction(tmp_path: Path, form: str) -> None:
    output = Trainer(Net(form), arguments(tmp_path)).predict(rows(5))
    assert output.predictions.shape == (5, 3)
    assert output.metrics["test_loss"] > 0


def test_with_a_loss_from_outside_a_tuple_holds_predictions_only(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return torch.nn.functional.cross_entropy(outputs[0], labels)

    trainer = Trainer(Net("tuple"), arguments(tmp_path), compute_loss_func=loss)
    output = trainer.predict(rows(5))
    assert output.predictions.shape == (5, 3)
    assert output.metrics["test_loss"] > 0
