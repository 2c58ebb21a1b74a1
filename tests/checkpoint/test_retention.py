from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.checkpoint.faults import save

from windlass.checkpoint.manifest import CheckpointInfo
from windlass.checkpoint.retention import Retention, best_of, metric_of, surplus
from windlass.checkpoint.store import Store


def infos(steps: set[int]) -> list[CheckpointInfo]:
    return [CheckpointInfo(Path(f"run/checkpoint-{step}"), step, 1, {}) for step in sorted(steps)]


@given(
    steps=st.sets(st.integers(0, 30), max_size=8),
    limit=st.none() | st.integers(-1, 9),
    protected=st.sets(st.integers(0, 30), max_size=2),
)
@example(steps={1, 2}, limit=-1, protected=set())
def test_what_stays(steps: set[int], limit: int | None, protected: set[int]) -> None:
    whole = infos(steps)
    gone = {
        info.step
        for info in surplus(whole, Retention(limit), [Path(f"run/checkpoint-{step}") for step in protected])
    }
    kept = steps - gone
    assert protected & steps <= kept
    assert not steps or max(steps) in kept
    if limit is None or limit <= 0:
        assert not gone
    else:
        assert len(kept) <= max(limit, len(protected) + 1)
        assert len(kept) >= min(limit, len(steps))
        free = kept - protected  # the unprotected that stay are the newest of those
        assert not free or min(free) > max(gone - protected, default=-1)


histories = st.lists(
    st.tuples(st.none() | st.sampled_from([0.1, 0.2, 0.3, 0.4]), st.booleans()), max_size=9
)  # of each checkpoint: its metric, and whether it is ephemeral


@given(
    history=histories,
    last=st.none() | st.integers(1, 4),
    best=st.none() | st.integers(1, 4),
    greater=st.booleans(),
    protected=st.sets(st.integers(0, 8), max_size=2),
)
def test_last_best_and_ephemeral_ones_are_told_apart(
    history: list[tuple[float | None, bool]],
    last: int | None,
    best: int | None,
    greater: bool,
    protected: set[int],
) -> None:
    whole = [
        CheckpointInfo(
            Path(f"run/checkpoint-{step}"), step, 1, {}, {"metric": metric, "ephemeral": ephemeral}, step
        )
        for step, (metric, ephemeral) in enumerate(history)
    ]
    policy = Retention(last=last, best=best, greater_is_better=greater)
    gone = {
        info.step for info in surplus(whole, policy, [Path(f"run/checkpoint-{step}") for step in protected])
    }
    kept = set(range(len(history))) - gone
    permanent = [step for step, (_, ephemeral) in enumerate(history) if not ephemeral]
    assert protected & set(range(len(history))) <= kept
    assert not history or len(history) - 1 in kept, "the newest always stays"
    if last is None and best is None:
        assert set(permanent) <= kept
    else:
        newest = set(permanent[-(last or 1) :])
        rated = sorted(
            (step for step in permanent if history[step][0] is not None),
            key=lambda step: (-1 if greater else 1) * (history[step][0] or 0),
        )
        wanted = (
            newest | set(rated[: best or 0]) | (protected & set(range(len(history)))) | {len(history) - 1}
        )
        assert not history or kept == wanted
    for step in kept:
        ephemeral = history[step][1]
        assert not ephemeral or step == len(history) - 1 or step in protected


@given(
    history=st.lists(st.booleans(), min_size=1, max_size=9), limit=st.integers(1, 4), best=st.integers(0, 8)
)
def test_ephemeral_ones_take_no_place_of_others(history: list[bool], limit: int, best: int) -> None:
    whole = [
        CheckpointInfo(Path(f"run/checkpoint-{step}"), step, 1, {}, {"ephemeral": ephemeral}, step)
        for step, ephemeral in enumerate(history)
    ]
    gone = surplus(whole, Retention(limit=limit), [Path(f"run/checkpoint-{best}")])
    kept = [info.step for info in whole if info not in gone]
    permanent = [step for step, ephemeral in enumerate(history) if not ephemeral]
    others = [step for step in permanent if step != best]
    room = limit - (best in permanent)
    # The newest of all stays, whatever it is and however little room there is.
    wanted = (
        set(others[-room:] if room > 0 else []) | {len(history) - 1} | ({best} & set(range(len(history))))
    )
    assert set(kept) == wanted


def test_what_has_no_finite_metric_is_none_of_the_best() -> None:
    values = [None, float("nan"), "0.1", True, 0.5, 0.25]
    whole = [
        CheckpointInfo(Path(f"run/checkpoint-{n}"), n, 1, {}, {"metric": v}, n) for n, v in enumerate(values)
    ]
    assert [metric_of(info) for info in whole] == [None, None, None, None, 0.5, 0.25]
    assert [info.step for info in best_of(whole, 9, greater_is_better=False)] == [5, 4]


def names(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in root.iterdir())


@pytest.mark.parametrize(
    ("limit", "best", "expected"),
    [
        (1, None, [4]),
        (1, 2, [2, 4]),
        (1, 4, [4]),
        (2, 2, [2, 4]),
        (2, 4, [3, 4]),
        (3, 1, [1, 3, 4]),
        (None, None, [1, 2, 3, 4]),
    ],
)
def test_best_and_last_stay(limit: int | None, best: int | None, expected: list[int], tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        last_best = best if best is not None and best <= step else None
        save(
            tmp_path,
            step,
            limit=None if step < 4 else limit,
            protected=[tmp_path / f"checkpoint-{last_best}"] if last_best else [],
        )
    assert names(tmp_path) == expected


def test_an_older_run_s_go_first_whatever_their_steps(tmp_path: Path) -> None:
    for step in (400, 500):
        save(tmp_path, step, limit=None)
    save(tmp_path, 10, limit=2)
    assert names(tmp_path) == [10, 500]
    save(tmp_path, 20, limit=2)
    assert names(tmp_path) == [10, 20]


def test_order_is_that_of_commits_not_of_steps_or_file_times(tmp_path: Path) -> None:
    for step in (30, 20, 9):
        save(tmp_path, step, limit=None)
        os.utime(tmp_path / f"checkpoint-{step}", (step, step))
    Retention(2).apply(Store(tmp_path), [])
    assert names(tmp_path) == [9, 20]


def test_a_damaged_one_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, limit=None)
    (tmp_path / "checkpoint-3" / "model.safetensors").unlink()
    Retention(1).apply(Store(tmp_path), [])
    assert names(tmp_path) == [2, 3]


def test_folders_that_are_none_of_ours_stay(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-old", "runs"):
        (tmp_path / name).mkdir()
    save(tmp_path, 2)
    save(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint-1",
        "checkpoint-old",
        "runs",
        "checkpoint-3",
    }
    shutil.rmtree(tmp_path)


def test_a_protected_one_stays_under_the_name_it_gets_back(tmp_path: Path) -> None:
    """Noted while its replacement was interrupted, it had its interim name; the next save gives it its own back."""
    save(tmp_path, 1)
    (tmp_path / "checkpoint-1").rename(tmp_path / "replaced-checkpoint-1")
    save(tmp_path, 2, limit=1, protected=[tmp_path / "replaced-checkpoint-1"])
    assert names(tmp_path) == [1, 2]
