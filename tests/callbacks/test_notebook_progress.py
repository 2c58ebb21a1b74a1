"""Progress in notebooks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tests.callbacks.notebook_cells import execute

from windlass.callbacks.progress import NotebookProgressCallback, progress_html
from windlass.core.errors import MissingDependencyError
from windlass.core.events import TrainerControl, TrainerState


def test_bar_and_table() -> None:
    rows = [{"Step": 10, "Training Loss": None}, {"Step": 20, "Training Loss": 1.25, "<b>": "x&y"}]
    page = progress_html("20/40 [1:01]", (20, 40), rows)
    assert '<progress value="20" max="40"' in page
    assert "20/40 [1:01]" in page
    assert "<th>Step</th><th>Training Loss</th><th>&lt;b&gt;</th>" in page
    assert "<tr><td>10</td><td>No log</td><td>No log</td></tr>" in page
    assert "<tr><td>20</td><td>1.25</td><td>x&amp;y</td></tr>" in page
    assert "progress" not in progress_html("20/40 [1:01]", None, rows)
    assert "<pre>" not in page


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
    assert "<progress" not in last, "the run is over"
    assert "<progress" in shown.outputs[0].data["text/html"]
    assert "<pre>loss: * training, o validation" in last
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
    callback.on_train_end(args, state, control)
    assert shown.outputs[-1].data["text/html"].count("<tr>") == 3


def test_values_that_are_not_numbers_do_not_end_a_run(make_args: Any, shown: Any) -> None:
    """Scripts log text, and append rows of their own to the history."""
    callback, args = NotebookProgressCallback(), make_args(eval_strategy="steps")
    state, control = TrainerState(max_steps=4, global_step=1), TrainerControl()
    state.log_history = [{"loss": 1.0}, {"eval_loss": "n/a", "step": 1}, {"loss": "n/a", "step": 1}]
    callback.on_train_begin(args, state, control)
    callback.on_log(args, state, control, logs={"loss": "n/a"})
    callback.on_evaluate(args, state, control, metrics={"eval_loss": 2**2000, "eval_f1": "n/a"})
    callback.on_train_end(args, state, control)
    assert "n/a" in shown.outputs[-1].data["text/html"]


def test_a_long_run_has_a_short_page(make_args: Any, shown: Any) -> None:
    callback, args = NotebookProgressCallback(), make_args()
    state, control = TrainerState(max_steps=2000), TrainerControl()
    callback.on_train_begin(args, state, control)
    for step in range(1, 2001):
        state.global_step = step
        callback.on_log(args, state, control, logs={"loss": 9.0 if step == 777 else 1.0 / step})
    callback.on_train_end(args, state, control)
    last = shown.outputs[-1].data["text/html"]
    assert last.count("<tr>") == 21
    assert "1980 earlier rows are in metrics.jsonl" in last
    highest = last.partition("<pre>")[2].splitlines()[1]
    assert highest.startswith("10 |")
    assert "*" in last.partition("<pre>")[2]


def test_an_evaluation_outside_training_has_a_bar(make_args: Any, shown: Any) -> None:
    callback, args = NotebookProgressCallback(), make_args()
    state, control = TrainerState(), TrainerControl()
    for _ in range(3):
        callback.on_prediction_step(args, state, control, eval_dataloader=[1, 2, 3])
    assert '<progress value="1" max="3"' in shown.outputs[0].data["text/html"]
    callback.on_evaluate(args, state, control, metrics={"eval_loss": 1.0})
    assert "evaluate 3/3" in shown.outputs[-1].data["text/html"]
    assert "<progress" not in shown.outputs[-1].data["text/html"]


def _pages(outputs: list[Any]) -> list[str]:
    return [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]


def _lines(outputs: list[Any], stream: str) -> str:
    return "".join(output.text for output in outputs if output.get("name") == stream)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the cells of one notebook left: to start a kernel takes longer than all of them."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = {
        "trained": "made = trainer(eval_strategy='steps', eval_steps=2)\nmade.train()",
        "evaluated": "made.evaluate()",
        "shown": "made",
        "removed": "made.remove_callback(ProgressCallback)\nmade.train().global_step",
        "failed": "TrainingArguments('out', learning_rate=-1)",
        "interrupted": "result = trainer(Waits(), folder='stopped').train()",
        "resumed": "result = trainer(folder='stopped').train(resume_from_checkpoint=True)",
    }
    return dict(zip(cells, execute(tmp_path_factory.mktemp("notebook"), *cells.values()), strict=True))


def test_cells_of_a_notebook(outputs: dict[str, list[Any]]) -> None:
    (page,) = _pages(outputs["trained"])
    assert "train 6/6" in page
    assert "<progress" not in page
    assert "o validation" in page
    assert "* training" in page
    assert page.count("<tr>") == 4
    assert len(_pages(outputs["evaluated"])) == 1
    (html,) = _pages(outputs["shown"])
    assert "Line" in html
    assert "6 of 6" in html
    assert not _pages(outputs["removed"])
    failed = outputs["failed"]
    assert failed[-1].ename == "ConfigError"
    assert "site-packages" not in (said := "\n".join(failed[-1].traceback))
    assert "learning_rate=-1" in said
    for name in ("trained", "evaluated", "shown", "removed"):
        assert not _lines(outputs[name], "stderr"), f"{name}: notebooks show it in red"
        assert not [output for output in outputs[name] if output.output_type == "error"], name


def test_an_interrupted_cell_ends_with_where_to_continue(outputs: dict[str, list[Any]]) -> None:
    (page,) = _pages(outputs["interrupted"])
    assert "train 4/6" in page
    assert "<progress" not in page
    assert not _lines(outputs["interrupted"], "stderr")
    last = _lines(outputs["interrupted"], "stdout").splitlines()[-1]
    assert last.endswith(
        "stopped at step 4 of 6; stopped/checkpoint-4 is complete. train(resume_from_checkpoint=True) continues from it"
    )
    (page,) = _pages(outputs["resumed"])
    assert "train 6/6" in page
    assert page.count("<tr>") == 7, "with the rows of the first part"
