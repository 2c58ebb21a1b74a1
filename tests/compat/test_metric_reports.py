from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import trainer_pt_utils
from transformers import trainer_utils as reference

from windlass import Trainer, TrainingArguments
from windlass.compat import metric_reports as ours
from windlass.metrics.speed import speed_metrics


def test_metrics_are_formatted_as_by_the_reference() -> None:
    metrics: dict[str, Any] = {
        "train_runtime": 3725.5,
        "eval_runtime": 0.25,
        "train_mem_cpu_alloc_delta": 5 << 20,
        "total_flos": float(7 << 30),
        "eval_loss": 0.123456,
        "epoch": 3,
        "note": "x",
    }
    before = dict(metrics)
    assert ours.metrics_format(metrics) == trainer_pt_utils.metrics_format(metrics)
    assert metrics == before


@pytest.mark.parametrize("counts", [{}, {"num_samples": 10, "num_steps": 4, "num_tokens": 1000}])
def test_speeds_have_the_names_of_the_reference(counts: dict[str, int]) -> None:
    started = time.time() - 2
    found = speed_metrics("eval", started, **counts)
    wanted = reference.speed_metrics(split="eval", start_time=started, **counts)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=0.2)


def test_methods_of_a_trainer_are_functions_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2, 1)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), report_to="none", learning_rate=0.5))
    assert ours.get_num_trainable_parameters(trainer) == 3
    trainer.create_optimizer()
    assert ours.get_learning_rates(trainer) == [0.5, 0.5]
    assert ours.get_optimizer_group(trainer, model.weight)["params"][0] is model.weight
    ours.log_metrics(trainer, "eval", {"eval_loss": 0.5})
    assert "eval_loss = 0.5" in capsys.readouterr().out
    ours.save_metrics(trainer, "eval", {"eval_loss": 0.5})
    ours.save_state(trainer)
    assert {path.name for path in tmp_path.iterdir()} >= {
        "eval_results.json",
        "all_results.json",
        "trainer_state.json",
    }
