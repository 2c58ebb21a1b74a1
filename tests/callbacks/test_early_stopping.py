"""Patience, threshold, and the count that survives a restart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback
from windlass.callbacks.early_stopping import EarlyStoppingCallback
from windlass.core.errors import ConfigError
from windlass.core.events import TrainerControl, TrainerState


def stops_at(callback: Any, args: Any, values: list[float]) -> int | None:
    """The evaluation (from 1) at which training is stopped, with `best_metric` kept as the Trainer keeps it."""
    state = TrainerState()
    for count, value in enumerate(values, start=1):
        control = TrainerControl()
        callback.on_evaluate(args, state, control, metrics={"eval_loss": value})
        if control.should_training_stop:
            return count
        better = math.isfinite(value) and (
            state.best_metric is None
            or (value > state.best_metric if args.greater_is_better else value < state.best_metric)
        )
        state.best_metric = value if better else state.best_metric
    return None


def test_patience_counts_evaluations_in_a_row(make_args: Any) -> None:
    assert stops_at(EarlyStoppingCallback(2), make_args(), [5.0, 4.0, 4.5, 3.0, 3.5, 3.2]) == 6
    assert stops_at(EarlyStoppingCallback(1), make_args(), [5.0, 4.0, 4.5]) == 3
    assert stops_at(EarlyStoppingCallback(3), make_args(), [5.0, 4.0, 4.5, 4.5]) is None


def test_a_stop_is_announced_once_and_by_one_process(
    make_args: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for main in (True, False):
        callback, control = EarlyStoppingCallback(2), TrainerControl()
        state = TrainerState(global_step=190, max_steps=380, best_metric=1.0, is_world_process_zero=main)
        for _ in range(3):  # the third is of another evaluation set
            callback.on_evaluate(make_args(), state, control, metrics={"eval_loss": 2.0})
    assert capsys.readouterr().out == "stopped at 190 of 380: eval_loss has not improved for 2 evaluations\n"


def test_gain_must_exceed_the_threshold(make_args: Any) -> None:
    assert stops_at(EarlyStoppingCallback(1, 0.5), make_args(), [5.0, 4.5]) == 2
    assert stops_at(EarlyStoppingCallback(1, 0.5), make_args(), [5.0, 4.4]) is None


def test_greater_is_better(make_args: Any) -> None:
    assert stops_at(EarlyStoppingCallback(1), make_args(greater_is_better=True), [0.1, 0.2, 0.3]) is None
    assert stops_at(EarlyStoppingCallback(1), make_args(greater_is_better=True), [0.1, 0.2, 0.2]) == 3


def test_nan_is_no_improvement(make_args: Any) -> None:
    assert stops_at(EarlyStoppingCallback(1), make_args(), [1.0, math.nan]) == 2
    assert stops_at(EarlyStoppingCallback(2), make_args(), [math.nan] * 9) == 2, (
        "a run that never had a number"
    )
    assert stops_at(EarlyStoppingCallback(2), make_args(), [math.inf, -math.inf, 1.0]) == 2
    assert stops_at(EarlyStoppingCallback(2), make_args(), [math.nan, 5.0, 4.0, math.nan]) is None


def test_the_count_of_an_earlier_run_is_not_saved_by_the_next_one(tmp_path: Path) -> None:
    """Else a resume before the first evaluation would stop at once."""
    options = {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "same"}
    args = arguments(tmp_path, max_steps=12, save_strategy="steps", greater_is_better=True, **options)

    def trainer() -> Trainer:
        data = {"train_dataset": rows(24), "eval_dataset": rows(8)}
        callbacks = [EarlyStoppingCallback(1)]
        return Trainer(Net(), args, callbacks=callbacks, compute_metrics=lambda _: {"same": 1.0}, **data)

    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("it failed")

    first = trainer()
    first.train()
    assert first.state.global_step == 8
    first.add_callback(Fails())
    with pytest.raises(RuntimeError, match="it failed"):
        first.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8


@given(
    values=st.lists(st.floats(-10, 10), max_size=12), patience=st.integers(1, 4),
    threshold=st.floats(0, 2), greater=st.booleans(),
)  # fmt: skip
def test_same_as_transformers(values: list[float], patience: int, threshold: float, greater: bool) -> None:
    theirs = pytest.importorskip("transformers.trainer_callback")
    from types import SimpleNamespace

    args = SimpleNamespace(metric_for_best_model="loss", greater_is_better=greater)
    ours = stops_at(EarlyStoppingCallback(patience, threshold), args, values)
    assert ours == stops_at(theirs.EarlyStoppingCallback(patience, threshold), args, values)


def test_metric_may_be_named_with_its_prefix(make_args: Any) -> None:
    args = make_args(metric_for_best_model="eval_loss")
    assert stops_at(EarlyStoppingCallback(1), args, [1.0, 2.0]) == 2


def test_evaluation_without_the_metric_is_warned_of(make_args: Any, log_lines: Any) -> None:
    callback, control = EarlyStoppingCallback(1), TrainerControl()
    for _ in range(2):
        callback.on_evaluate(make_args(), TrainerState(best_metric=1.0), control, metrics={"eval_f1": 0.5})
    assert not control.should_training_stop
    assert log_lines.text.count("an evaluation without eval_loss is ignored") == 1


def test_refuses_to_start_without_metric_or_evaluation(make_args: Any) -> None:
    args = make_args(metric_for_best_model=None, eval_strategy="no")
    with pytest.raises(ConfigError) as caught:
        EarlyStoppingCallback().on_train_begin(args, TrainerState(), TrainerControl())
    assert [p.field for p in caught.value.problems] == ["metric_for_best_model", "eval_strategy"]
    assert "EarlyStoppingCallback requires metric_for_best_model to be defined" in str(caught.value)


def test_warns_when_the_best_model_will_not_be_loaded(make_args: Any, log_lines: Any) -> None:
    args = make_args(load_best_model_at_end=False, eval_strategy="steps")
    EarlyStoppingCallback().on_train_begin(args, TrainerState(), TrainerControl())
    assert "without load_best_model_at_end=True" in log_lines.text


@pytest.mark.parametrize(
    "bad",
    [
        {"early_stopping_patience": 0},
        {"early_stopping_patience": math.nan},
        {"early_stopping_patience": "3"},
        {"early_stopping_patience": None},
        {"early_stopping_threshold": -0.1},
        {"early_stopping_threshold": "0.1"},
    ],
)
def test_absurd_arguments_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        EarlyStoppingCallback(**bad)


def test_no_threshold_means_zero() -> None:
    assert EarlyStoppingCallback(1, None).early_stopping_threshold == 0.0
