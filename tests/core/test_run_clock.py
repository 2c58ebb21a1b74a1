"""Each second of a session belongs to one kind, by a clock that the test moves."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from windlass.core.run_clock import (
    BACKWARD,
    CALLBACKS,
    COMPUTE,
    DATA,
    EVALUATION,
    EXCHANGE,
    SAVE,
    UPDATE,
    Moment,
    RunClock,
)


class Hands:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def started() -> tuple[Hands, RunClock]:
    hands = Hands()
    clock = RunClock(hands, lambda: 1000.0 + hands.now)
    clock.begin()
    clock.not_before(1000.0 + hands.now)  # without what this process did before
    return hands, clock


def update(hands: Hands, clock: RunClock, step: int, *, applied: bool = True, data: float = 0.3) -> None:
    before = clock.enter(DATA)
    hands.now += data
    clock.enter(before)
    clock.enter(COMPUTE)
    hands.now += 0.4
    clock.enter(BACKWARD)
    hands.now += 0.2
    clock.enter(UPDATE)
    hands.now += 0.1
    clock.enter(COMPUTE)
    clock.update_ends(step, applied)


def test_every_second_has_one_kind_and_the_sum_is_the_time() -> None:
    hands, clock = started()
    hands.now += 5.0
    for step in range(1, 11):
        update(hands, clock, step)
    with clock.within(SAVE):
        hands.now += 0.5
        with clock.within(CALLBACKS):  # as of `on_save`
            hands.now += 0.25
    with clock.within(EVALUATION):
        hands.now += 2.0
    found = clock.read()
    expected = {
        "start_up": 5.0,
        "data": 3.0,
        "compute": 6.0,
        "update": 1.0,
        "save": 0.5,
        "callbacks": 0.25,
        "evaluation": 2.0,
    }
    assert found.seconds == pytest.approx(expected)
    assert sum(found.seconds.values()) == pytest.approx(found.elapsed, rel=1e-9)
    assert (found.step, found.kind) == (10, "compute")


def test_what_is_under_way_counts_for_its_kind() -> None:
    hands, clock = started()
    clock.enter(EXCHANGE)
    hands.now += 7.0
    assert clock.read().seconds == pytest.approx({"exchange": 7.0})
    assert clock.read().kind == "exchange"


def test_updates_that_were_done_before_are_repeated_and_refused_ones_skipped() -> None:
    hands, clock = started()
    clock.continue_from(4, highest=6)
    update(hands, clock, 5)
    update(hands, clock, 6)
    update(hands, clock, 7, applied=False)
    update(hands, clock, 8)
    assert clock.read().seconds == pytest.approx(
        {"repeated": 2.0, "skipped": 1.0, "data": 0.3, "compute": 0.6, "update": 0.1}
    )
    # After a rollback to 6, what was done up to 8 is done again.
    update(hands, clock, 7)
    update(hands, clock, 8)
    update(hands, clock, 9)
    assert clock.read().seconds["repeated"] == pytest.approx(4.0)


def test_an_interval_ends_with_its_report() -> None:
    hands, clock = started()
    hands.now += 1.0
    update(hands, clock, 1)
    first = clock.interval()
    assert first.seconds == pytest.approx({"start_up": 1.0, "data": 0.3, "compute": 0.6, "update": 0.1})
    assert (first.training, first.own) == (pytest.approx(1.0), pytest.approx(0.7))
    hands.now += 0.5  # the device is waited for, after the interval
    clock.continue_from(1, highest=2)
    update(hands, clock, 2)
    again = clock.interval()
    assert again.seconds == pytest.approx({"repeated": 1.5})
    assert sum(again.seconds.values()) == pytest.approx(1.5)


def test_a_session_begins_once_and_is_claimed_once() -> None:
    hands, clock = started()
    assert clock.claim()
    assert not clock.claim()
    assert not clock.begin(), "a run within a callback has no clock of its own"
    clock.end()
    assert not clock.claim()
    hands.now += 3.0
    assert clock.begin()
    assert clock.claim()
    assert clock.read().elapsed == 0.0


def test_a_session_of_another_thread_is_said_not_to_be_repeatable(caplog: pytest.LogCaptureFixture) -> None:
    _, clock = started()
    assert not clock.begin()
    assert not caplog.records, "of a callback, on the thread of the run"
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(clock.begin).result()
        assert "another thread of this process trains at the same time" in caplog.text
        caplog.clear()
        clock.end()
        assert pool.submit(clock.begin).result()
    assert not caplog.records


def test_a_copy_of_a_moment_is_its_time() -> None:
    began = Moment()
    for again in (copy.copy(began), copy.deepcopy(began), pickle.loads(pickle.dumps(began))):
        assert (type(again), again) == (float, float(began)), "another process has another monotonic clock"
