from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path

import pytest

from windlass.checkpoint.run_lock import FolderInUse
from windlass.core.errors import (
    ConfigError,
    ModelError,
    OutdatedDependencyError,
    Preempted,
    Problem,
    RankMismatchError,
    first_line,
)
from windlass.hub.client import HubError


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (OSError(2, "gone"), "[Errno 2] gone"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    assert first_line(error) == line


def _errors() -> list[BaseException]:
    return [
        ModelError("no loss"),
        ConfigError([Problem("seed", -1, "must not be negative"), Problem("optim", "x", "is not known")]),
        RankMismatchError(["seed: 1 on rank 0, 2 on rank 1"]),
        OutdatedDependencyError("torch", "2.8", "2.9", "pip install torch"),
        Preempted(3, Path("run/checkpoint-3")),
        FolderInUse(Path("run/lock"), "pid 7"),
        HubError("the Hub does not answer", passing=True, status=503),
    ]


@pytest.mark.parametrize("number", range(len(_errors())))
def test_an_error_is_copied_and_sent_as_it_was_made(number: int) -> None:
    error = _errors()[number]
    error.add_note("at step 3")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
        assert vars(again) == vars(error)


def _fail(number: int) -> None:
    raise _errors()[number]


@pytest.mark.parametrize("number", [1, 3])
def test_an_error_leaves_a_pool_of_processes(number: int) -> None:
    error = _errors()[number]
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(type(error)) as caught:
        pool.apply_async(_fail, (number,)).get(60)
    assert str(caught.value) == str(error)
