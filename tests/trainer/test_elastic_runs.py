"""A run that changes its number of processes keeps its updates: their samples, their order, their results."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch
from tests.trainer.elastic_ranks import stretch

from windlass import read_metrics
from windlass.core.errors import ConfigError

SCRIPT = Path(__file__).parent / "elastic_ranks.py"


@pytest.mark.dist
def test_updates_keep_their_samples_on_another_number_of_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clean = stretch(tmp_path / "clean", 12, False, gradient_accumulation_steps=2)
    launch(2, SCRIPT, tmp_path / "elastic", 3, "fresh")
    with caplog.at_level(logging.WARNING):
        stretch(tmp_path / "elastic", 7, True)
    assert "an update keeps its 8 samples: 4 x 2 micro-batches x 1 processes" in caplog.text
    said = launch(2, SCRIPT, tmp_path / "elastic", 9, "resume")
    assert said.count("was saved by 1 process(es), this run has 2") == 1, "one process reports for all"
    last = stretch(tmp_path / "elastic", 12, True)
    assert last.state.global_step == clean.state.global_step == 12
    assert last.accelerator.gradient_accumulation_steps == 2
    for ours, theirs in zip(last.model.parameters(), clean.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row]
        for name in ("clean", "elastic")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_a_batch_size_given_anew_wins(tmp_path: Path) -> None:
    stretch(tmp_path, 2, False, gradient_accumulation_steps=2)
    resumed = stretch(tmp_path, 4, True, gradient_accumulation_steps=3)
    assert resumed.accelerator.gradient_accumulation_steps == 3


def test_the_epoch_of_a_run_with_larger_updates_is_that_of_its_data(tmp_path: Path) -> None:
    """The four samples of its first update are less than one of its further ones, of which three are an epoch."""
    stretch(tmp_path, 1, False)
    resumed = stretch(tmp_path, 2, True, gradient_accumulation_steps=4)
    assert resumed.state.epoch == pytest.approx(1 / 3)


def test_a_global_batch_size_decides(tmp_path: Path) -> None:
    stretch(tmp_path / "derived", 12, False, global_batch_size=8)
    stretch(tmp_path / "said", 12, False, gradient_accumulation_steps=2)
    weights = [
        (tmp_path / name / "checkpoint-12" / "model.safetensors").read_bytes() for name in ("derived", "said")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("size", "accumulation", "words"),
    [
        (10, 1, "multiple of per_device_train_batch_size=4 x 1"),
        (16, 2, "contradicts gradient_accumulation_steps=2"),
    ],
)
def test_a_global_batch_size_that_cannot_be_is_refused(
    tmp_path: Path, size: int, accumulation: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        stretch(tmp_path, 2, False, global_batch_size=size, gradient_accumulation_steps=accumulation)
