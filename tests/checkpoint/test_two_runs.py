"""Two runs in one folder: the newest is the one committed last, whatever its step."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoint.faults import CountingFiles, newest, save, vanish
from tests.checkpoint.test_faults import in_child

from windlass.checkpoint.content import Content
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.manifest import MANIFEST_NAME, _seal
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.store import Store


def test_a_fresh_short_run_is_newer_than_an_older_long_one(tmp_path: Path) -> None:
    save(tmp_path, 1000, limit=None)
    save(tmp_path, 10, limit=None)
    assert [info.step for info in Store(tmp_path).list()] == [1000, 10]
    assert Store(tmp_path).resume_point(True).path == tmp_path / "checkpoint-10"


def test_without_serials_the_order_is_that_of_steps_and_before_all_others(tmp_path: Path) -> None:
    for step in (30, 9, 20):
        save(tmp_path, step, limit=None)
        path = tmp_path / f"checkpoint-{step}" / MANIFEST_NAME
        body = json.loads(path.read_text())
        del body["serial"], body["sha256"]
        path.write_text(json.dumps(body | {"sha256": _seal(body)}))
    assert newest(tmp_path) == 30
    save(tmp_path, 2, limit=None)
    assert [info.step for info in Store(tmp_path).list()] == [9, 20, 30, 2]


def test_the_serial_goes_on_where_retention_left_it(tmp_path: Path) -> None:
    for step in (5, 1, 2):
        save(tmp_path, step, limit=1)
    assert [info.serial for info in Store(tmp_path).list()] == [3]


def mark(root: Path, step: int, number: int, files: CountingFiles, limit: int | None) -> Path | None:
    manager = CheckpointManager(Store(root, files=files), Retention(limit))
    return manager.save(step, Content(), meta={"mark": number})


def marks(root: Path) -> list[int]:
    return [info.meta["mark"] for info in Store(root).list()]


saves = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 3), st.none() | st.integers(1, 22)), min_size=1, max_size=8
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(history=saves, limit=st.sampled_from([None, 1, 2]))
def test_order_is_that_of_commits_through_kills(
    history: list[tuple[int, int, int | None]], limit: int | None, fast_disk: Path
) -> None:
    """Each save: which run makes it (their steps interleave and collide), by how many steps it has gone on, and at
    which file operation it is killed, if at all.
    """
    root = Path(tempfile.mkdtemp(dir=fast_disk)) / "run"
    steps = [0, 0]
    standing: list[int] = []
    for number, (run, stride, killed_at) in enumerate(history):
        steps[run] += stride
        step = steps[run]
        if killed_at is None:
            assert mark(root, step, number, CountingFiles(), limit) is not None
            assert marks(root)[-1] == number
        else:
            in_child(lambda: mark(root, step, number, CountingFiles(killed_at, vanish), limit))  # noqa: B023
        found = marks(root)
        assert set(found) <= {*standing, number}
        assert found == sorted(found), "marks count the saves, so this is the order of commits"
        assert not standing or found, "one that stood is gone and nothing came for it"
        assert not standing or found[-1] >= standing[-1]
        path, _ = Store(root).newest_verified()
        assert path is None or Store(root).verify(path).meta["mark"] == found[-1]
        standing = found
    shutil.rmtree(root.parent)
