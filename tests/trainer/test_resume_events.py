"""Callbacks of a resumed run: no event of an epoch is lost or doubled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.trainer.resume_cases import KILLED, Case, Recorder, events, in_a_child, kill, run, same_run

from windlass import Trainer, TrainerCallback

LAST_OF_EPOCH = 5
EDGES_CASE = Case(
    {
        "eval_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 1,
    }
)
EDGES = [
    ("on_step_end", 1),
    ("on_save", 1),  # the save of the step
    ("on_epoch_end", 1),
    ("on_evaluate", 1),
    ("on_save", 2),  # the save of the best, after the epoch's evaluation
    ("on_epoch_begin", 1),
]


@pytest.fixture(scope="module")
def whole_and_events(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer, list[str]]:
    """An undisturbed run: its folder, its trainer and its events."""
    place = tmp_path_factory.mktemp("edges")
    whole = run(place / "whole", EDGES_CASE, Recorder(place / "expected"))
    return place / "whole", whole, events(place / "expected")


@pytest.mark.parametrize(("event", "occurrence", "step"), [
    (event, occurrence, step)
    for event, occurrence in EDGES
    for step in (LAST_OF_EPOCH, 2 * LAST_OF_EPOCH)
    if (event, step) != ("on_epoch_begin", 2 * LAST_OF_EPOCH)  # no epoch begins after the last one
])  # fmt: skip
def test_no_event_of_an_epoch_is_lost_or_doubled(
    event: str,
    occurrence: int,
    step: int,
    folder: Path,
    whole_and_events: tuple[Path, Trainer, list[str]],
) -> None:
    case, (undisturbed, whole, expected) = EDGES_CASE, whole_and_events
    if event == "on_save" and expected.count(f"save {step} {step / LAST_OF_EPOCH:.6f}") < occurrence:
        pytest.skip("this epoch's evaluation was not the best")
    first = folder / "killed"
    callbacks = [Recorder(folder / "before"), kill(event, step, occurrence)]
    assert in_a_child(lambda: run(first, case, *callbacks)) == KILLED
    resumed = run(first, case, Recorder(folder / "after"), resume=True)
    before = events(folder / "before")
    kept = len(before) - next(i for i, line in enumerate(reversed(before)) if line.startswith("save "))
    assert before[:kept] + events(folder / "after") == expected
    same_run(first, resumed, undisturbed, whole)


class Timed(TrainerCallback):
    """Needs `on_epoch_begin` before the other events of an epoch, and is in no checkpoint."""

    begun: int

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.begun < state.global_step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del self.begun


@pytest.mark.parametrize("step", [3, LAST_OF_EPOCH], ids=["within the epoch", "at its end"])
def test_a_new_callback_sees_the_resumed_epoch_begin(step: int, folder: Path) -> None:
    case = Case({"save_steps": 1})
    assert in_a_child(lambda: run(folder, case, Timed(), kill("on_save", step))) == KILLED
    resumed = run(folder, case, Timed(), resume=True)
    assert resumed.state.global_step == resumed.state.max_steps


class EndsEpoch(TrainerCallback):
    """Ends each epoch after three updates."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step % 3 == 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listens, so that the event is not left out."""


def test_an_epoch_that_a_callback_had_ended_stays_ended(folder: Path) -> None:
    case = Case({"save_steps": 1})
    whole = run(folder / "whole", case, EndsEpoch())
    killed = folder / "killed"
    assert in_a_child(lambda: run(killed, case, EndsEpoch(), kill("on_save", 3))) == KILLED
    same_run(killed, run(killed, case, EndsEpoch(), resume=True), folder / "whole", whole)
