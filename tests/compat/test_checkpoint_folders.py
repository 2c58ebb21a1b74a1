from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import trainer_pt_utils
from transformers import trainer_utils as reference

from windlass.compat import checkpoint_folders as ours
from windlass.core.logs import get_logger


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """`caplog` for the `windlass` loggers, which do not propagate to the root."""
    logger = get_logger()
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for position, name in enumerate(
        ("checkpoint-5", "checkpoint-100", "checkpoint-20", "checkpoint-7-old", "runs")
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        os.utime(tmp_path / name, (1000 * position, 1000 * position))
    (tmp_path / "checkpoint-900").touch()
    (tmp_path / "tmp-checkpoint-950").mkdir()
    return tmp_path


def test_the_last_checkpoint_is_that_of_the_highest_step(folder: Path, tmp_path_factory: Any) -> None:
    assert ours.get_last_checkpoint(str(folder)) == reference.get_last_checkpoint(str(folder))
    assert ours.get_last_checkpoint(folder) == str(folder / "checkpoint-100")
    assert ours.get_last_checkpoint(tmp_path_factory.mktemp("empty")) is None
    with pytest.raises(FileNotFoundError):
        ours.get_last_checkpoint(folder / "nothing")


@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("best", [None, "checkpoint-5", "checkpoint-100", "checkpoint-7-old", "nothing"])
def test_checkpoints_are_sorted_as_by_the_reference(folder: Path, by_time: bool, best: str | None) -> None:
    chosen = None if best is None else str(folder / best)
    found = ours.sort_checkpoints(str(folder), use_mtime=by_time, best_model_checkpoint=chosen)
    assert found == reference.sort_checkpoints(str(folder), use_mtime=by_time, best_model_checkpoint=chosen)


def test_times_that_are_all_alike_do_not_decide(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1000, 1000))
    found = ours.sort_checkpoints(folder, use_mtime=True)
    assert found == reference.sort_checkpoints(str(folder), use_mtime=True)
    assert found[-1].endswith("checkpoint-100")


@pytest.mark.parametrize("limit", [None, 0, 1, 2, 3, 9])
@pytest.mark.parametrize("best", [None, "checkpoint-5"])
def test_the_same_checkpoints_are_removed(
    folder: Path, tmp_path_factory: Any, limit: int | None, best: str | None
) -> None:
    other = tmp_path_factory.mktemp("other")
    for path in folder.iterdir():
        (other / path.name).mkdir() if path.is_dir() else (other / path.name).touch()
    for module, root in ((ours, folder), (reference, other)):
        module.rotate_checkpoints(str(root), limit, None if best is None else str(root / best))
    assert {p.name for p in folder.iterdir()} == {p.name for p in other.iterdir()}


def test_the_best_is_kept_however_its_path_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "link").symlink_to(folder)
    monkeypatch.chdir(folder.parent)
    for best in (
        str(folder / "checkpoint-5"),
        str(folder.parent / "link" / "checkpoint-5"),
        "link/checkpoint-5",
    ):
        ordered = ours.sort_checkpoints(folder.name, best_model_checkpoint=best)
        assert [Path(path).name for path in ordered][-2:] == ["checkpoint-5", "checkpoint-100"]
        ours.rotate_checkpoints(folder.name, 1, best)
        assert (folder / "checkpoint-5").is_dir()


def test_files_are_removed_on_the_main_process_alone(tmp_path: Path) -> None:
    for module in (ours, trainer_pt_utils):
        (tmp_path / "a").touch()
        module.remove_dummy_checkpoint(False, str(tmp_path), ["a", "b"])
        assert (tmp_path / "a").exists()
        module.remove_dummy_checkpoint(True, str(tmp_path), ["a", "b"])
        assert not (tmp_path / "a").exists()


def test_settings_that_differ_from_the_checkpoint_are_named_once(said: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(
        logging_steps=5, eval_steps=None, save_steps=9, per_device_train_batch_size=4, n_gpu=0
    )
    same = SimpleNamespace(logging_steps=5, eval_steps=3, save_steps=9, train_batch_size=4)
    ours.compare_trainer_and_checkpoint_args(args, same)
    assert not said.records
    other = SimpleNamespace(logging_steps=5, eval_steps=3, save_steps=8, train_batch_size=2)
    ours.compare_trainer_and_checkpoint_args(args, other)
    text = said.records[0].getMessage()
    assert "save_steps=9 (then 8)" in text
    assert "per_device_train_batch_size=4 (then 2)" in text
    assert "logging_steps" not in text
