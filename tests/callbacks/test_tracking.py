"""The Trainer and its trackers: what is sent, and what happens when one fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.callbacks.test_tracker_registry import WAITS_OF_A_RUN, Notes, Waited
from tests.trainer.small import Net, arguments, bert, rows, token_rows

from windlass import Trainer, read_metrics
from windlass.callbacks import tracking
from windlass.callbacks.tracking import TrackingCallback, sent_values
from windlass.core.events import TrainerControl, TrainerState


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    yield
    tracking._open.clear()


class Recorder(Notes):
    """Records its calls in order, opening and closing too."""

    def start(self) -> None:
        self.kept.append("start")

    def finish(self) -> None:
        self.kept.append("finish")


def train(folder: Path, tracker: Notes, **changes: Any) -> Trainer:
    args = arguments(folder, logging_steps=1, eval_strategy="steps", eval_steps=2, **changes)
    trainer = Trainer(
        Net(), args, train_dataset=rows(16), eval_dataset=rows(8), callbacks=[TrackingCallback(tracker)]
    )
    trainer.train()
    return trainer


def logged(tracker: Notes) -> list[Any]:
    return [item for item in tracker.kept if isinstance(item, tuple)]


def test_a_tracker_of_ones_own_is_sent_every_row(tmp_path: Path) -> None:
    tracker = Recorder()
    train(tmp_path, tracker)
    written = read_metrics(tmp_path / "metrics.jsonl")
    assert logged(tracker) == [(row["step"], sent_values(row)) for row in written]
    assert {row["event"] for row in written} == {"log", "evaluate", "summary"}
    assert all({"wall", "event", "step"}.isdisjoint(values) for _, values in logged(tracker))
    assert tracker.kept[0] == "start"
    assert tracker.kept[1]["max_steps"] == 4


def test_metrics_after_training_reach_the_same_run(tmp_path: Path) -> None:
    tracker = Recorder()
    trainer = train(tmp_path, tracker)
    before = len(tracker.kept)
    trainer.evaluate(metric_key_prefix="test")
    assert "test_loss" in tracker.kept[before][1]
    assert tracker.kept.count("start") == 1
    assert "finish" not in tracker.kept


def test_metrics_before_training_open_the_run(tmp_path: Path) -> None:
    tracker = Recorder()
    args = arguments(tmp_path)
    callbacks = [TrackingCallback(tracker)]
    trainer = Trainer(Net(), args, train_dataset=rows(16), eval_dataset=rows(8), callbacks=callbacks)
    trainer.evaluate()
    trainer.train()
    assert tracker.kept[0] == "start"
    assert "eval_loss" in tracker.kept[1][1]
    assert tracker.kept.count("start") == 1


def test_the_next_trainer_ends_what_an_earlier_one_left_open(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    train(tmp_path / "a", first)
    assert first.kept[-1] != "finish"
    train(tmp_path / "b", second)
    assert first.kept[-1] == "finish"


def test_a_second_training_is_a_run_of_its_own(tmp_path: Path) -> None:
    tracker = Recorder()
    trainer = train(tmp_path, tracker)
    trainer.train()
    opened = [item for item in tracker.kept if isinstance(item, str)]
    assert opened == ["start", "finish", "start"]


def test_a_tracker_that_fails_does_not_stop_training(
    tmp_path: Path, log_lines: pytest.LogCaptureFixture
) -> None:
    class Broken(Recorder):
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            raise ConnectionError(f"at {step} the line is dead")  # another text each time

    trainer = train(tmp_path, Broken())
    assert trainer.state.global_step == 4
    warnings = [r.message for r in log_lines.records if "is dead" in r.message]
    assert len(warnings) == 1
    assert "notes received no metrics; training continues" in warnings[0]


def test_a_tracker_that_takes_long_to_fail_is_left_alone_for_a_while(tmp_path: Path) -> None:
    """MLflow tries for minutes to reach a server that is down; each report would wait for that."""
    now = [0.0]

    class Slow(Recorder):
        down = True

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            super().log(values, step)
            if self.down:
                now[0] += 60.0
                raise ConnectionError("no answer")

    tracker, other = Slow(), Recorder()  # which have one name
    callback = TrackingCallback([tracker, other], clock=lambda: now[0])
    args, state = arguments(tmp_path), TrainerState(max_steps=9)
    callback.on_train_begin(args, state, TrainerControl())
    for step in range(1, 5):  # the first takes until 60 s; 600 s later is the third
        state.global_step = step
        callback.on_log(args, state, TrainerControl(), logs={"loss": 1.0})
        now[0] += 300.0
    assert [item[0] for item in logged(tracker)] == [1, 3]
    tracker.down, now[0] = False, 2000.0
    for step in (5, 6):
        state.global_step = step
        callback.on_log(args, state, TrainerControl(), logs={"loss": 1.0})
    assert [item[0] for item in logged(tracker)] == [1, 3, 5, 6]
    assert [item[0] for item in logged(other)] == [1, 2, 3, 4, 5, 6]


def test_a_tracker_that_never_answers_is_named_by_the_watchdog(tmp_path: Path) -> None:
    first = Waited()
    for tracker in (first, Waited()):
        callback, state = TrackingCallback(tracker), TrainerState(max_steps=1)
        callback.on_train_begin(arguments(tmp_path), state, TrainerControl())
        callback.on_log(arguments(tmp_path), state, TrainerControl(), logs={"loss": 1.0})
    assert first.waits == WAITS_OF_A_RUN


def test_a_tracker_that_cannot_start_stops_before_training(tmp_path: Path) -> None:
    class Closed(Recorder):
        def start(self) -> None:
            raise PermissionError("no key")

    with pytest.raises(PermissionError, match="no key"):
        train(tmp_path, Closed())
    assert not (tmp_path / "metrics.jsonl").exists()


def test_two_trackers_of_one_name_are_both_open(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    callbacks = [TrackingCallback([first, second])]
    Trainer(Net(), arguments(tmp_path), train_dataset=rows(16), callbacks=callbacks).train()
    assert "finish" not in [*first.kept, *second.kept]
    assert logged(first) == logged(second) != []


def test_a_tracker_that_did_not_start_is_tried_again(tmp_path: Path) -> None:
    """Also by the next report, which must not go to the trackers before it alone."""

    class Second(Recorder):
        name = "second"

        def start(self) -> None:
            super().start()
            if len(self.kept) == 1:
                raise PermissionError("no key")

    first, second = Recorder(), Second()
    callbacks = [TrackingCallback([first, second])]
    trainer = Trainer(Net(), arguments(tmp_path), eval_dataset=rows(8), callbacks=callbacks)
    with pytest.raises(PermissionError, match="no key"):
        trainer.evaluate()
    trainer.evaluate()
    assert len(logged(first)) == len(logged(second)) == 1


def test_an_earlier_run_that_cannot_be_ended_does_not_keep_the_next_from_starting(
    tmp_path: Path, log_lines: pytest.LogCaptureFixture
) -> None:
    class Lost(Recorder):
        def finish(self) -> None:
            raise ConnectionError("the line is dead")

    train(tmp_path / "a", Lost())
    second = Recorder()
    train(tmp_path / "b", second)
    assert len(logged(second)) > 0
    assert (
        "the earlier run of notes could not be ended: ConnectionError('the line is dead')" in log_lines.text
    )


def test_a_fresh_training_does_not_continue_the_run_that_one_before_it_was_resumed_from(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    args = arguments(tmp_path, report_to="tensorboard", save_strategy="steps", save_steps=2, max_steps=4)
    data = {"train_dataset": rows(16), "eval_dataset": rows(8)}
    Trainer(Net(), args, **data).train()
    trainer = Trainer(Net(), args, **data)
    (tracking_callback,) = trainer.callback_handler.of_kind(TrackingCallback)
    trainer.evaluate()  # opens a run, which the resumed training keeps
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (saved,) = tracking_callback.state_dict().values()
    args.run_name = "another"
    trainer.train()
    assert list(tracking_callback.state_dict().values()) == ["another"] != [saved]
    trainer.train()
    # In one folder, TensorBoard would draw both as one run.
    assert list(tracking_callback.state_dict().values()) == ["another-2"]
    assert (tmp_path / "runs" / "another-2").is_dir()


def test_arguments_and_the_models_configuration_go_along(tmp_path: Path) -> None:
    tracker = Recorder()
    args = arguments(tmp_path, hub_token=None, run_name="small", max_steps=1)
    Trainer(bert(), args, train_dataset=token_rows(4), callbacks=[TrackingCallback(tracker)]).train()
    told = tracker.kept[1]
    assert told["model/hidden_size"] == 16
    assert told["learning_rate"] == args.learning_rate
    assert told["run_name"] == "small"


def test_report_to_comes_before_the_scripts_callbacks(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    mine = TrackingCallback(Recorder())
    trainer = Trainer(Net(), arguments(tmp_path, report_to="tensorboard"), callbacks=[mine])
    present = [c for c in trainer.callback_handler.callbacks if isinstance(c, TrackingCallback)]
    assert len(present) == 2
    assert present[1] is mine
    assert not [
        c
        for c in Trainer(Net(), arguments(tmp_path)).callback_handler.callbacks
        if isinstance(c, TrackingCallback)
    ]
