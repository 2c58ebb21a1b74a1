"""The cadence of logs, evaluations and saves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.callbacks.flow import DefaultFlowCallback
from windlass.core.events import CONTROL_FLAGS, TrainerControl, TrainerState


def run(args: Any, max_steps: int, **strides: int) -> dict[str, list[int]]:
    """The steps at which each flag is set."""
    state = TrainerState(max_steps=max_steps, **strides)
    flow, seen = DefaultFlowCallback(), {flag: [] for flag in CONTROL_FLAGS}
    for step in range(1, max_steps + 1):
        state.global_step = step
        control = flow.on_step_end(args, state, TrainerControl())
        for flag in CONTROL_FLAGS:
            if getattr(control, flag):
                seen[flag].append(step)
    return seen


def test_strides_and_the_last_step(make_args: Any) -> None:
    seen = run(make_args(eval_strategy="steps"), 10, logging_steps=3, eval_steps=4, save_steps=6)
    assert seen["should_log"] == [3, 6, 9]  # the summary covers the end, so a last log is not forced
    assert seen["should_evaluate"] == [4, 8, 10]
    assert seen["should_save"] == [6, 10]
    assert seen["should_training_stop"] == [10]
    assert seen["should_epoch_stop"] == []


def test_first_step_is_logged_on_request_whatever_the_strategy(make_args: Any) -> None:
    for strategy in ("no", "epoch"):
        args = make_args(logging_first_step=True, logging_strategy=strategy)
        assert run(args, 5, logging_steps=2)["should_log"] == [1]
    assert run(make_args(logging_first_step=True), 5, logging_steps=2)["should_log"] == [1, 2, 4]


def test_no_strategy_asks_for_nothing_but_the_end(make_args: Any) -> None:
    args = make_args(logging_strategy="no", eval_strategy="no", save_strategy="no")
    seen = run(args, 4, logging_steps=1, eval_steps=1, save_steps=1)
    assert [seen[flag] for flag in ("should_log", "should_evaluate", "should_save")] == [[], [], []]
    assert seen["should_training_stop"] == [4]


def test_delay_holds_evaluation_back_even_at_the_end(make_args: Any) -> None:
    assert run(make_args(eval_strategy="steps", eval_delay=5), 7, eval_steps=2)["should_evaluate"] == [6, 7]
    assert run(make_args(eval_strategy="steps", eval_delay=50), 7, eval_steps=2)["should_evaluate"] == []


@pytest.mark.parametrize("strategy", ["epoch", "no", "steps"])
def test_end_of_an_epoch(make_args: Any, strategy: str) -> None:
    args = make_args(logging_strategy=strategy, eval_strategy=strategy, save_strategy=strategy)
    control = DefaultFlowCallback().on_epoch_end(args, TrainerState(epoch=1.0), TrainerControl())
    asked = (control.should_log, control.should_evaluate, control.should_save)
    assert asked == ((strategy == "epoch"),) * 3


def test_delay_counts_epochs_when_evaluating_by_epoch(make_args: Any) -> None:
    args = make_args(eval_strategy="epoch", eval_delay=2)
    flow = DefaultFlowCallback()
    asked = [
        flow.on_epoch_end(args, TrainerState(epoch=float(e)), TrainerControl()).should_evaluate
        for e in (1, 2, 3)
    ]
    assert asked == [False, True, True]


STRATEGY = st.sampled_from(["no", "steps", "epoch"])


@given(
    logging=STRATEGY, evaluation=STRATEGY, save=STRATEGY, first=st.booleans(), delay=st.integers(0, 12),
    strides=st.tuples(*[st.integers(1, 12)] * 3), max_steps=st.integers(1, 12),
)  # fmt: skip
def test_same_as_transformers(logging, evaluation, save, first, delay, strides, max_steps) -> None:
    theirs = pytest.importorskip("transformers.trainer_callback")
    from types import SimpleNamespace

    args = SimpleNamespace(
        logging_strategy=logging,
        eval_strategy=evaluation,
        save_strategy=save,
        logging_first_step=first,
        eval_delay=delay,
    )
    names = dict(zip(("logging_steps", "eval_steps", "save_steps"), strides, strict=True))
    state = TrainerState(max_steps=max_steps, **names)
    for step in range(1, max_steps + 1):
        state.global_step, state.epoch = step, step / 4
        for event in ("on_step_end", "on_epoch_end"):
            ours = getattr(DefaultFlowCallback(), event)(args, state, TrainerControl())
            other = getattr(theirs.DefaultFlowCallback(), event)(args, state, theirs.TrainerControl())
            assert vars(ours) == vars(other), (event, step)
