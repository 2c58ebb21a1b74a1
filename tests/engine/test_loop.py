"""The loop alone, with an executor that only counts: when things happen, and where it goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.errors import NonFiniteError
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.rng import StepSeeder
from windlass.core.types import State
from windlass.data.update_batch import UpdateBatch
from windlass.dist.gang import Gang
from windlass.engine.executor import StepResult
from windlass.engine.feed import Counts, Feed
from windlass.engine.loop import Loop, LoopHooks, LoopOptions
from windlass.metrics.ledger import Ledger

CPU = torch.device("cpu")


class Source:
    """Epochs of a number of groups, with or without saying how many."""

    def __init__(self, length: int, known: bool) -> None:
        self.length, self.known, self.epoch, self.taken = length, known, 0, 0

    def groups(self, accumulation: int) -> Iterator[UpdateBatch]:
        while self.taken < self.length:
            self.taken += 1
            last = self.taken == self.length
            position = {"epoch": self.epoch + last, "taken": 0 if last else self.taken}
            number = self.epoch * self.length + self.taken
            yield UpdateBatch([number], [[number]], 1, self.epoch, last, False, position)

    def groups_per_epoch(self, accumulation: int) -> int | None:
        return self.length if self.known else None

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch or self.taken == self.length:
            self.epoch, self.taken = epoch, 0

    def state_dict(self) -> State:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: State) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


class Counting:
    """Replaces an executor: records the data that it was given."""

    def __init__(self, bad: int | None) -> None:
        self.bad = bad
        self.cleared = 0

    def zero_grad(self) -> None:
        self.cleared += 1

    def run_step(self, update: UpdateBatch, hooks: Any, *, max_norm: float | None, guard: bool) -> StepResult:
        assert self.cleared == 1, "gradients from before the run would be added to its first update"
        hooks.trace.append(f"update {update.batches[0]}")
        value = torch.tensor(math.nan if update.batches[0] == self.bad else 1.0)
        return StepResult(value, value, not (guard and update.batches[0] == self.bad), {})

    dispatch = None


class Hooks(LoopHooks):
    counts = Counts(lambda _: 1.0, lambda _: (0, 0))

    def __init__(self, state: TrainerState, act: dict[int, str]) -> None:
        self.control, self.state, self.act = TrainerControl(), state, act
        self.steps = self  # type: ignore[assignment]
        self.trace: list[str] = []
        self.saved: dict[int, State] = {}
        self.loop: Loop

    def epoch_begin(self, resumed: bool) -> None:
        if not resumed:
            self.trace.append("epoch")

    def epoch_end(self, complete: bool) -> None:
        self.trace.append(f"end {self.state.epoch:g}")
        self._save()

    def step_end(self, batch: Any, applied: bool) -> None:
        flag = self.act.get(self.state.global_step)
        if flag is not None:
            setattr(self.control, flag, True)
        self._save()

    def _save(self) -> None:
        self.saved[len(self.trace)] = {"loop": self.loop.state_dict(), "state": self.state.to_dict()}


def made(
    length: int,
    epochs: int,
    max_steps: int,
    known: bool = True,
    act: dict[int, str] | None = None,
    kind: type[Hooks] = Hooks,
    **options: Any,
) -> tuple[Loop, Hooks]:
    state = TrainerState(max_steps=max_steps)
    hooks = kind(state, act or {})
    loop = Loop(
        Counting(options.get("bad")),  # type: ignore[arg-type]
        Feed(Source(length, known), 1, Gang()),
        hooks,  # type: ignore[arg-type]
        Ledger(CPU, lambda value: value),
        StepSeeder(0, 0, CPU),
        LoopOptions(epochs, None, options.get("guard", False)),
    )
    hooks.loop = loop
    return loop, hooks


def test_epochs_and_events() -> None:
    loop, hooks = made(2, 2, 4)
    loop.run(hooks)
    assert hooks.trace == ["epoch", "update 1", "update 2", "end 1", "epoch", "update 3", "update 4", "end 2"]


def test_max_steps_ends_within_an_epoch() -> None:
    loop, hooks = made(4, 2, 6)
    loop.run(hooks)
    assert hooks.trace[-3:] == ["update 5", "update 6", "end 1.5"]


def test_a_callback_stops_the_epoch_or_the_run() -> None:
    loop, hooks = made(3, 2, 6, act={1: "should_epoch_stop"})
    loop.run(hooks)
    assert [line for line in hooks.trace if line.startswith("update")] == [
        "update 1",
        "update 4",
        "update 5",
        "update 6",
    ]
    loop, hooks = made(3, 2, 6, act={2: "should_training_stop"})
    loop.run(hooks)
    assert hooks.trace == ["epoch", "update 1", "update 2", f"end {2 / 3:g}"]


@given(
    length=st.integers(1, 4),
    epochs=st.integers(1, 3),
    part=st.integers(0, 3),
    known=st.booleans(),
    choice=st.integers(0, 1000),
)
def test_a_loop_goes_on_from_wherever_it_was_saved(
    length: int, epochs: int, part: int, known: bool, choice: int
) -> None:
    steps = max(length * epochs - part, 1)
    loop, hooks = made(length, epochs, steps, known)
    loop.run(hooks)
    at = sorted(hooks.saved)[choice % len(hooks.saved)]
    again, resumed = made(length, epochs, steps, known)
    again.load_state_dict(hooks.saved[at]["loop"])
    resumed.state.global_step = hooks.saved[at]["state"]["global_step"]
    resumed.state.epoch = hooks.saved[at]["state"]["epoch"]
    again.run(resumed)
    assert hooks.trace[:at] + resumed.trace == hooks.trace


def test_an_epoch_that_a_callback_ended_stays_ended() -> None:
    """Killed behind the save that followed the callback's word, before the loop acted on it."""
    act = {2: "should_epoch_stop"}
    loop, hooks = made(4, 2, 8, act=act)
    loop.run(hooks)
    at = hooks.trace.index("update 2") + 1
    again, resumed = made(4, 2, 8, act=act)
    resumed.state.global_step = 2
    resumed.state.epoch = 0.5
    again.load_state_dict(hooks.saved[at]["loop"])
    again.run(resumed)
    assert hooks.trace[:at] + resumed.trace == hooks.trace


def test_raising_names_step_and_samples_and_comes_before_the_steps_events() -> None:
    loop, hooks = made(5, 1, 5, bad=3)
    with pytest.raises(NonFiniteError, match=r"at step 3 \(samples 3\): loss nan, gradient norm nan"):
        loop.run(hooks)
    assert max(hooks.saved) == 3, "nothing was due after it"


def test_a_guarded_loop_goes_on() -> None:
    loop, hooks = made(5, 1, 5, bad=3, guard=True)
    loop.run(hooks)
    assert hooks.state.global_step == 5


def test_an_epoch_that_a_callback_ends_at_its_beginning_is_skipped() -> None:
    class Skipping(Hooks):
        def epoch_begin(self, resumed: bool) -> None:
            super().epoch_begin(resumed)
            self.control.should_epoch_stop = len(self.trace) < 3

    loop, hooks = made(2, 3, 6, kind=Skipping)
    loop.run(hooks)
    assert hooks.trace[:4] == ["epoch", "end 0", "epoch", "update 3"]
    assert hooks.trace[-2:] == ["update 6", "end 3"]


def test_data_that_gives_nothing_ends_the_run() -> None:
    loop, hooks = made(0, 3, 9, known=False)
    loop.run(hooks)
    assert hooks.trace == ["epoch", "end 0"]
