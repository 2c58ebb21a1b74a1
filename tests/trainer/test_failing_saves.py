"""Runs whose output folder fails, goes away, or stays away: what it costs, and how they end."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.background_cases import trainer_of
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback
from windlass.checkpoint.files import Files
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError
from windlass.dist.gang import current
from windlass.trainer import run_checkpoints


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_checkpoints, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(run_checkpoints, "LAST_PAUSES", (0.0, 0.0))


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Lets folders of steps for which `which` says so not be made."""

    def refuse(which: Callable[[int], bool], number: int = errno.ENOTCONN) -> None:
        make = Files.make_folder

        def make_folder(files: Files, path: Path) -> None:
            if path.name.startswith("tmp-checkpoint-") and which(int(path.name.rpartition("-")[2])):
                raise OSError(number, os.strerror(number), str(path))
            make(files, path)

        monkeypatch.setattr(Files, "make_folder", make_folder)

    return refuse


class At(TrainerCallback):
    """Calls functions at the ends of updates."""

    def __init__(self, **calls: Callable[[], Any]) -> None:
        self._calls = calls

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._calls.get(f"step_{state.global_step}", lambda: None)()


def steps_of(folder: Path) -> list[int]:
    return [info.step for info in Store(folder).list()]


@pytest.mark.parametrize("background", [True, False])
def test_a_passing_error_does_not_cost_a_whole_interval(
    background: bool, folder: Path, refusing: Callable[..., None]
) -> None:
    refusing(lambda step: step == 10)
    trainer = trainer_of(folder, max_steps=20, save_steps=10, save_in_background=background)
    trainer.train()
    stands_in, last = steps_of(folder)
    assert 10 < stands_in < 16
    assert last == 20
    kept = [info.meta["ephemeral"] for info in Store(folder).list()]
    assert kept == [False, False], "it takes the place of the one that failed"


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EACCES])
def test_a_last_save_that_fails_is_an_error_in_the_end(
    number: int, folder: Path, refusing: Callable[..., None]
) -> None:
    ended: list[str] = []

    class Ending(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ended.append("told")

    refusing(lambda step: step == 6, number)
    trainer = trainer_of(folder, Ending(), max_steps=6, save_steps=3)
    with pytest.raises(
        CheckpointError, match=r"step 6, but its last save failed: .*Last whole checkpoint: .*-3\."
    ):
        trainer.train()
    assert ended == ["told"]
    assert trainer.state.log_history[-1]["train_loss"] > 0
    assert steps_of(folder) == [3]
    trainer.save_model(str(folder / "elsewhere"))  # as the message says


def test_a_last_save_is_tried_again(folder: Path, refusing: Callable[..., None]) -> None:
    attempts = []
    refusing(lambda step: step == 6 and (attempts.append(step) or len(attempts) < 3))  # type: ignore[func-returns-value]
    trainer_of(folder, max_steps=6, save_steps=3).train()
    assert steps_of(folder) == [3, 6]


@pytest.mark.parametrize("save_steps", [1, 7])
def test_a_run_that_cannot_save_ends(save_steps: int, folder: Path, refusing: Callable[..., None]) -> None:
    """Whether a save is due at each update or only now and then."""
    refusing(lambda step: step > 7)
    trainer = trainer_of(folder, max_steps=60, save_steps=save_steps, max_save_failures=4)
    with pytest.raises(
        CheckpointError, match=r"saving failed 4 times in a row \(max_save_failures=4\).*-7\."
    ):
        trainer.train()
    assert 10 < trainer.state.global_step < 40
    trainer_of(folder / "other", max_steps=30, save_strategy="no", max_save_failures=4).train()


def test_failures_within_a_pause_do_not_count(
    folder: Path, refusing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_checkpoints, "FIRST_PAUSE", 1e6)
    refusing(lambda step: 2 < step < 20)
    trainer_of(folder, max_steps=20, save_steps=1, max_save_failures=2).train()
    assert steps_of(folder) == [1, 2, 20]


def test_a_folder_that_is_removed_is_made_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = folder / "run"
    remove = At(step_5=lambda: shutil.rmtree(output))
    logging.getLogger("windlass").addHandler(caplog.handler)
    try:
        trainer_of(output, remove, max_steps=9, save_steps=3, logging_steps=1).train()
    finally:
        logging.getLogger("windlass").removeHandler(caplog.handler)
    assert 9 in steps_of(output)
    assert "was removed while the run goes on: it is made again" in caplog.text
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert {6, 7, 8, 9} <= {row["step"] for row in rows}


def test_nothing_is_written_below_a_mount_that_is_gone(folder: Path, tmp_path: Path) -> None:
    """The output's path leads to another disk for a while."""
    if os.stat(folder).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs two disks")
    mount, disk, below = tmp_path / "mount", folder / "disk", tmp_path / "below"
    disk.mkdir()
    below.mkdir()
    mount.symlink_to(disk)

    def lead_to(place: Path) -> Callable[[], None]:
        def change() -> None:
            mount.unlink()
            mount.symlink_to(place)

        return change

    seen: list[list[str]] = []
    away = At(step_4=lead_to(below), step_8=lambda: (seen.append(os.listdir(below)), lead_to(disk)()))
    waiting = {"save_in_background": False}  # or the first might be under way still
    trainer_of(mount / "run", away, max_steps=12, save_steps=2, logging_steps=1, **waiting).train()
    assert seen == [[]]
    assert {2, 10, 12} <= set(steps_of(disk / "run"))
    assert not {5, 6, 7} & set(steps_of(disk / "run"))
    rows = [json.loads(line) for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "log"] == list(range(1, 13)), (
        "kept until it was back"
    )


@pytest.mark.dist
def test_an_error_of_one_rank_is_one_of_all(folder: Path) -> None:
    told = on_ranks(2, main, folder)
    assert told[0] == told[1]
    passing, last, limit, gathered = told[0]
    assert gathered[-1] == 6, "no rank waited for the first one, whose folder was away at step 4"
    assert passing["error"] is None
    assert passing["steps"] == [6, 10, 12], "each of those that failed was made up for"
    assert "its last save failed" in last["error"]
    assert last["steps"] == [4]
    assert limit["error"].startswith("training ends at step")


@pytest.mark.dist
def test_the_main_process_saves_a_replicated_model_without_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    main, other = on_ranks(2, save_on_main_alone, str(tmp_path))
    assert other == {}
    assert main["override"] == ["KeyError", "'of the script'"], "the script's own error, with its traceback"
    kind, text = main["trainer"]
    assert (kind, str(tmp_path / "file") in text) == ("CheckpointError", True)
    assert text.endswith("choose another place, or make room and permission")
    assert main["saved"] == ["none", ""]
    assert (tmp_path / "model" / "model.safetensors").exists()


# --- what each rank runs ----------------------------------------------------------------------------------------------


RANK = int(os.environ.get("RANK", "0"))


def run(folder: Path, refused: Callable[[int], bool], number: int, **how: Any) -> dict[str, Any]:
    """A run in which rank 1 cannot write the steps for which `refused` says so."""
    before = Files.before

    def refuse(files: Files, operation: str, path: Path) -> None:
        stem = path.parent.name.rpartition("-")[2]
        if RANK == 1 and path.parent.name.startswith("tmp-checkpoint-") and refused(int(stem)):
            raise OSError(number, os.strerror(number), str(path))
        before(files, operation, path)

    Files.before = refuse  # type: ignore[method-assign]
    error = None
    try:
        trainer_of(folder, **how).train()
    except CheckpointError as raised:
        error = str(raised).split(":")[0]
    Files.before = before  # type: ignore[method-assign]
    torch.distributed.barrier()
    return {"error": error, "steps": [info.step for info in Store(folder).list()]}


class FolderAway(TrainerCallback):
    """On rank 0 a file is in place of the output folder, from update 3 to update 5."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir)
        if RANK == 0 and state.global_step == 3:
            shutil.rmtree(folder)
            folder.touch()
        if RANK == 0 and state.global_step == 5:
            folder.unlink()


def gathered(folder: Path) -> list[int]:
    """The steps that are saved by ranks that gather their shards on the first one, whose folder is away for a while."""
    parts = {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}
    changes = {"save_steps": 2, "max_steps": 6, "save_in_background": False, "ddp_timeout": 30}
    trainer_of(folder, FolderAway(), **parts, **changes).train()
    torch.distributed.barrier()
    return [info.step for info in Store(folder).list()]


def main(root: Path) -> list[Any]:
    run_checkpoints.FIRST_PAUSE = 0.0
    run_checkpoints.time.sleep = lambda seconds: None  # between attempts at a last save
    told = [
        run(
            root / "passing",
            lambda step: step in (4, 8),
            errno.ESTALE,
            save_steps=4,
            max_steps=12,
            save_in_background=False,
        ),
        run(root / "last", lambda step: step == 8, errno.ETIMEDOUT, save_steps=4, max_steps=8),
        run(root / "limit", lambda step: True, errno.EMFILE, save_steps=2, max_steps=40, max_save_failures=3),
    ]
    told.append(gathered(root / "gathered"))
    torch.distributed.destroy_process_group()
    return told


class SavesBadly(Trainer):
    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        raise KeyError("of the script")


def save_on_main_alone(folder: str) -> dict[str, list[str]]:
    args, place = arguments(Path(folder, "run")), str(Path(folder, "file", "model"))
    trainer = Trainer(Net(), args, train_dataset=rows(8))
    badly = SavesBadly(Net(), args, train_dataset=rows(8))
    found = {}
    if trainer.is_world_process_zero():
        found = {
            "trainer": _error_of(lambda: trainer.save_model(place)),
            "override": _error_of(lambda: badly.save_model(place)),
            "saved": _error_of(lambda: trainer.save_model(str(Path(folder, "model")))),
        }
    assert current().gather_objects(current().rank) == [0, 1], "the ranks are in step"
    return found


def _error_of(save: Callable[[], None]) -> list[str]:
    try:
        save()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]
