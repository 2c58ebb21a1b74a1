"""Methods as scripts copy them from transformers, to change a line: each trains and evaluates as that of Windlass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.trainer.small import Net, rows, settings, weights_hash

from windlass import Trainer, TrainingArguments

transformers = pytest.importorskip("transformers")

COPIED = """
_get_dataloader _get_eval_sampler _get_train_sampler _load_best_model _prepare_input _prepare_inputs
_remove_unused_columns _save compute_loss create_optimizer create_optimizer_and_scheduler create_scheduler
evaluate evaluation_loop floating_point_ops get_decay_parameter_names get_eval_dataloader get_test_dataloader
get_train_dataloader log predict prediction_step save_model training_step
"""


def results(kind: type[Trainer], folder: Path) -> Any:
    """Of two epochs whose last update has one micro-batch of two."""
    args = TrainingArguments(
        **settings(
            folder,
            max_steps=-1,
            num_train_epochs=2,
            gradient_accumulation_steps=2,
            train_sampling_strategy="sequential",
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
        )
    )
    trainer = kind(Net(), args, train_dataset=rows(20), eval_dataset=rows(6))
    trainer.train()
    trainer.save_model()
    names = ("loss", "learning_rate", "grad_norm", "eval_loss")
    found = [[entry.get(name) for name in names] for entry in trainer.state.log_history]
    predicted = trainer.predict(rows(5))
    return weights_hash(trainer.model), found, predicted.predictions.tolist(), predicted.metrics["test_loss"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return results(Trainer, tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("name", COPIED.split())
def test_a_copy_of_it_changes_nothing(tmp_path: Path, own: Any, name: str) -> None:
    kind = type("Mine", (Trainer,), {name: vars(transformers.Trainer)[name]})
    weights, found, predictions, loss = results(kind, tmp_path)
    assert weights == own[0]
    assert found == [pytest.approx(row) for row in own[1]]
    assert predictions == own[2]
    assert loss == pytest.approx(own[3])
