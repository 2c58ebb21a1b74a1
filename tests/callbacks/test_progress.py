"""What a run shows, on a terminal and in a pipe."""

from __future__ import annotations

import io
from typing import Any

import pytest

from windlass.callbacks.progress import ProgressCallback
from windlass.core.events import TrainerControl, TrainerState


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Stream:
    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        raise TypeError("an iterable dataset has no length")


def run(callback: ProgressCallback, args: Any, *, main: bool = True) -> None:
    state, control = TrainerState(max_steps=4, is_world_process_zero=main), TrainerControl()
    callback.on_train_begin(args, state, control)
    for step in range(1, 5):
        state.global_step = step
        callback.on_step_end(args, state, control)
        if step % 2 == 0:
            callback.on_log(
                args, state, control, logs={"loss": 1.0 / step, "total_flos": 1, "note": "n" * 200}
            )
            for _ in range(3):
                callback.on_prediction_step(args, state, control, eval_dataloader=[1, 2, 3])
            callback.on_evaluate(args, state, control, metrics={})
    callback.on_train_end(args, state, control)


def test_a_pipe_gets_one_plain_line_per_log(make_args: Any) -> None:
    out = io.StringIO()
    run(ProgressCallback(max_str_len=5, file=out), make_args())
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("[train 4/4 100%")
    assert lines[1].endswith("] loss 0.250  note nnnnn... (200 characters)")
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_run_that_continues_says_where(make_args: Any) -> None:
    out = io.StringIO()
    callback = ProgressCallback(file=out)
    state = TrainerState(max_steps=4, global_step=2, is_world_process_zero=True)
    callback.on_train_begin(make_args(), state, TrainerControl())
    assert out.getvalue().endswith("] continued after step 2\n")


def test_a_subclass_writes_by_the_bar_of_transformers(make_args: Any) -> None:
    class Writing(ProgressCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if state.is_world_process_zero and self.training_bar is not None:
                self.training_bar.write(f"step {state.global_step}")

    out = io.StringIO()
    callback = Writing(file=out)
    run(callback, make_args())
    assert [line.split("] ")[1] for line in out.getvalue().splitlines()] == ["step 2", "step 4"]
    assert callback.training_bar is None


def test_a_terminal_gets_a_bar_that_ends_full(make_args: Any) -> None:
    out = Terminal()
    run(ProgressCallback(file=out), make_args())
    assert "4/4" in out.getvalue()
    assert "loss 0.25" in out.getvalue()
    assert "evaluate" in out.getvalue()


def test_other_processes_are_silent(make_args: Any) -> None:
    out = io.StringIO()
    run(ProgressCallback(file=out), make_args(), main=False)
    assert out.getvalue() == ""


def test_standard_output_is_looked_up_when_training_begins(
    make_args: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run(ProgressCallback(), make_args())
    assert capsys.readouterr().out.count("\n") == 2


def test_evaluation_alone_has_its_own_bar(make_args: Any) -> None:
    out, args = Terminal(), make_args()
    callback, state, control = ProgressCallback(file=out), TrainerState(), TrainerControl()
    for _ in range(2):
        callback.on_prediction_step(args, state, control, eval_dataloader=[1, 2])
    callback.on_predict(args, state, control, {})
    assert "2/2" in out.getvalue()
    before = out.getvalue()
    callback.on_evaluate(args, state, control)
    assert out.getvalue() == before


def test_a_loader_without_length_has_no_bar(make_args: Any) -> None:
    out, args = Terminal(), make_args()
    callback = ProgressCallback(file=out)
    callback.on_prediction_step(args, TrainerState(), TrainerControl(), eval_dataloader=Stream())
    callback.on_prediction_step(args, TrainerState(), TrainerControl(), eval_dataloader=None)
    callback.on_evaluate(args, TrainerState(), TrainerControl())
    assert out.getvalue() == ""


def test_training_again_after_an_interruption(make_args: Any) -> None:
    out, args = io.StringIO(), make_args()
    callback, state = ProgressCallback(file=out), TrainerState(max_steps=4)
    callback.on_train_begin(args, state, TrainerControl())
    callback.on_prediction_step(args, state, TrainerControl(), eval_dataloader=[1, 2, 3])
    run(callback, args)  # the first run never ended
    assert len(out.getvalue().splitlines()) == 2
