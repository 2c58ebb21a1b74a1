"""What survives when the disk or the process fails at any one of the file operations of a save."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoint.faults import CountingFiles, ShortFiles, assert_whole, failing, newest, save, vanish

from windlass.checkpoint.store import Store


def in_child(body: Callable[[], object]) -> int:
    """Run `body` in a forked process (torch stays imported: a hundred take a second); return its exit status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def operations(prepare: Callable[[Path], None], fast_disk: Path, step: int) -> int:
    """How many file operations saving `step` takes after `prepare`."""
    root = fast_disk / "counted"
    prepare(root)
    files = CountingFiles()
    assert save(root, step, files) is not None
    return files.count


def first(root: Path) -> None:
    root.mkdir()


def after_one(root: Path) -> None:
    """An older checkpoint that retention removes (limit 1)."""
    save(root, 1)


def same_step(root: Path) -> None:
    """The checkpoint that is about to be written again."""
    save(root, 2)


def cut_off_in_replacement(root: Path) -> None:
    """An earlier process ended between the two renames of a replacement."""
    save(root, 2)
    (root / "checkpoint-2").rename(root / "replaced-checkpoint-2")


def with_leftovers(root: Path) -> None:
    save(root, 1)
    shutil.copytree(root / "checkpoint-1", root / "tmp-checkpoint-2")
    shutil.copytree(root / "checkpoint-1", root / "tmp-removed-checkpoint-0")


SITUATIONS = [first, after_one, same_step, cut_off_in_replacement, with_leftovers]


@pytest.mark.parametrize("prepare", SITUATIONS)
def test_a_process_that_ends_at_any_operation_leaves_a_whole_checkpoint(
    prepare: Callable[[Path], None], fast_disk: Path
) -> None:
    count = operations(prepare, fast_disk, step=2)
    assert count > 20
    for number in range(1, count + 1):
        root = fast_disk / f"at-{number}"
        prepare(root)
        before = newest(root)
        assert in_child(partial(save, root, 2, CountingFiles(number, vanish))) == 77
        found = newest(root)
        assert found in ({before, 2} if before is not None else {None, 2}), f"operation {number}"
        # The next process picks up as if nothing had been: same folder, same step, nothing left over.
        assert save(root, 2) is not None
        assert sorted(path.name for path in root.iterdir()) == ["checkpoint-2"], f"operation {number}"
        assert newest(root) == 2
        shutil.rmtree(root)


@pytest.mark.parametrize("prepare", SITUATIONS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_once_at_any_operation_costs_at_most_this_checkpoint(
    prepare: Callable[[Path], None], number: int, fast_disk: Path
) -> None:
    for at in range(1, operations(prepare, fast_disk, step=2) + 1):
        root = fast_disk / f"at-{at}"
        prepare(root)
        before = newest(root)
        saved = save(root, 2, CountingFiles(at, failing(number)))  # returns, and does not raise
        assert newest(root) == (before if saved is None else 2) or newest(root) == 2
        if saved is None:
            assert not (root / "tmp-checkpoint-2").exists(), (
                f"operation {at}: the staged checkpoint was not dropped"
            )
            assert prepare is not same_step or (root / "checkpoint-2").exists(), f"operation {at}"
        assert save(root, 3) == root / "checkpoint-3"
        assert newest(root) == 3
        shutil.rmtree(root)


def test_a_disk_that_stays_full_never_costs_the_old_checkpoint(fast_disk: Path) -> None:
    save(fast_disk, 1)
    for at in range(1, 40):
        files = CountingFiles()
        files.before = _full_from(at)  # type: ignore[method-assign]
        save(fast_disk, 1 + at, files)
        assert newest(fast_disk) is not None


def _full_from(at: int) -> Callable[[str, Path], None]:
    count = 0

    def before(operation: str, path: Path) -> None:
        nonlocal count
        count += 1
        if count >= at and operation in ("create", "write", "make_folder", "fsync"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return before


def test_short_writes_lose_nothing(fast_disk: Path) -> None:
    path = save(fast_disk, 4, ShortFiles())
    assert path is not None
    assert assert_whole(path) == 4


def test_the_new_one_stands_before_the_old_one_goes(fast_disk: Path) -> None:
    save(fast_disk, 1)
    files = CountingFiles()
    save(fast_disk, 2, files)
    commit = files.operations.index("rename tmp-checkpoint-2")
    removal = files.operations.index("rename checkpoint-1")
    assert files.operations[commit - 2 : commit] == ["fsync manifest.json", "fsync_folder tmp-checkpoint-2"]
    assert commit < files.operations.index(f"fsync_folder {fast_disk.name}") < removal


steps_and_faults = st.lists(
    st.tuples(
        st.integers(1, 6),  # step
        st.sampled_from(["well", "full", "broken", "refused", "killed"]),
        st.integers(1, 45),  # operation at which it happens
        st.booleans(),  # whether the oldest checkpoint is the best
    ),
    min_size=1,
    max_size=6,
)


# One folder in memory serves all examples; each makes its own inside it.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(history=steps_and_faults, limit=st.sampled_from([None, 1, 2]))
def test_once_one_was_committed_a_verified_one_always_exists(
    history: list[tuple[int, str, int, bool]], limit: int | None, fast_disk: Path
) -> None:
    root = Path(tempfile.mkdtemp(dir=fast_disk)) / "run"
    committed = False
    for step, event, at, keep_oldest in history:
        listed = Store(root).list()
        best = listed[0].path if listed and keep_oldest else None
        committed |= _attempt(root, step, event, at, limit, best)
        found = newest(root)
        assert found is not None or not committed
        assert best is None or Store(root).verify(_current(best))
    shutil.rmtree(root.parent)


def _current(path: Path) -> Path:
    """Where a checkpoint lies now: between the two renames of a replacement it has another name."""
    name = path.name.removeprefix("replaced-")
    return path.with_name(name) if path.with_name(name).exists() else path.with_name("replaced-" + name)


def _attempt(root: Path, step: int, event: str, at: int, limit: int | None, best: Path | None) -> bool:
    if event == "killed":
        in_child(lambda: save(root, step, CountingFiles(at, vanish), limit, protected=[best] if best else []))
        return newest(root) is not None
    faults = {
        "well": lambda: None,
        "full": failing(),
        "broken": failing(errno.EIO),
        "refused": failing(errno.EACCES),
    }
    files = CountingFiles(at, faults[event])
    return save(root, step, files, limit, protected=[best] if best else []) is not None
