"""Progress in notebooks."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from windlass.callbacks.notebook import NotebookProgressCallback, progress_html
from windlass.core.errors import MissingDependencyError
from windlass.core.events import TrainerControl, TrainerState


def test_bar_and_table() -> None:
    rows = [{"Step": 10, "Training Loss": None}, {"Step": 20, "Training Loss": 1.25, "<b>": "x&y"}]
    page = progress_html(20, 40, 61.0, rows)
    assert '<progress value="20" max="40"' in page
    assert "20/40 [1:01]" in page
    assert "<th>Step</th><th>Training Loss</th><th>&lt;b&gt;</th>" in page
    assert "<tr><td>10</td><td>No log</td><td>No log</td></tr>" in page
    assert "<tr><td>20</td><td>1.25</td><td>x&amp;y</td></tr>" in page
    assert "progress" not in progress_html(0, 0, 0.0, rows)


def test_outside_a_notebook_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, make_args: Any) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    with pytest.raises(MissingDependencyError, match="IPython is needed to show progress in a notebook"):
        NotebookProgressCallback().on_train_begin(make_args(), TrainerState(max_steps=1), TrainerControl())


@pytest.fixture
def shown() -> Any:
    """What IPython was asked to show: a real display publisher that keeps what it is given."""
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    with capture_output() as captured:
        yield captured
    InteractiveShell.clear_instance()


def test_a_run_with_evaluation(make_args: Any, shown: Any) -> None:
    callback, args = NotebookProgressCallback(), make_args(eval_strategy="steps")
    state, control = TrainerState(max_steps=4), TrainerControl()
    callback.on_train_begin(args, state, control)
    for step in range(1, 5):
        state.global_step = step
        callback.on_step_end(args, state, control)
        callback.on_log(args, state, control, logs={"loss": 1.0 / step})
        if step % 2 == 0:
            for name in ("a", "b"):
                metrics = {f"eval_{name}_loss": 2.0, f"eval_{name}_runtime": 3.0, "epoch": 1.0}
                callback.on_evaluate(args, state, control, metrics=metrics)
    callback.on_train_end(args, state, control)
    last = shown.outputs[-1].data["text/html"]
    assert "4/4" in last
    assert "<th>Step</th><th>Training Loss</th><th>A Loss</th><th>B Loss</th>" in last
    assert last.count("<tr>") == 3  # the head, and one row for each step with an evaluation
    assert "<td>4</td><td>0.25</td><td>2</td><td>2</td>" in last


def test_a_run_without_evaluation_has_a_row_per_log(make_args: Any, shown: Any) -> None:
    callback, args = NotebookProgressCallback(), make_args()
    state, control = TrainerState(max_steps=4), TrainerControl()
    callback.on_train_begin(args, state, control)
    for step in (1, 2):
        state.global_step = step
        callback.on_log(args, state, control, logs={"loss": 1.0 / step, "grad_norm": 1.0})
    assert shown.outputs[-1].data["text/html"].count("<tr>") == 3
