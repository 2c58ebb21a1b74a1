from __future__ import annotations

import errno
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.checkpoint.faults import CountingFiles, Ranks, assert_whole, failing, newest, save, state_of
from tests.dist.launch import Started, launch

from windlass.checkpoint.content import Content
from windlass.checkpoint.files import Files
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the manager logs as an error."""
    lines: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("windlass.checkpoint.manager"), "error", lambda *a: lines.append(a[0] % a[1:])
    )
    return lines


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert path == tmp_path / "checkpoint-7"
    assert assert_whole(path) == 7
    checkpoint = CheckpointManager(Store(tmp_path)).load(str(path))
    assert (checkpoint.step, checkpoint.world_size, checkpoint.folder) == (7, 1, path)
    assert checkpoint.has("optimizer")
    assert not checkpoint.has("scaler")


def test_missing_parts_are_errors(tmp_path: Path) -> None:
    path = CheckpointManager(Store(tmp_path)).save(1, Content(), meta={})
    assert path is not None
    checkpoint = CheckpointManager(Store(tmp_path)).load(path)
    with pytest.raises(CheckpointError, match="no part 'optimizer'"):
        checkpoint.shared("optimizer")
    with pytest.raises(CheckpointError, match="no part 'rng' of rank 0; it has: none"):
        checkpoint.per_rank("rng", 0)
    with pytest.raises(CheckpointError, match="saved by 1 rank"):
        checkpoint.per_rank("rng", 1)
    with pytest.raises(CheckpointError, match="has no weights"):
        checkpoint.load_weights(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_costs_the_checkpoint_and_is_said_loudly(
    number: int, tmp_path: Path, said: list[str]
) -> None:
    assert save(tmp_path, 1, CountingFiles(9, failing(number))) is None
    assert "CHECKPOINT 1 WAS NOT SAVED on rank 0" in said[0]
    assert "there is no earlier one" in said[0]
    assert ("Make room in" in said[0]) is (number != errno.EIO)
    save(tmp_path, 2)
    assert save(tmp_path, 3, CountingFiles(9, failing(number))) is None
    assert "checkpoint-2 is still whole" in said[1]
    assert newest(tmp_path) == 2


def test_a_failure_is_said_by_the_rank_that_failed_and_by_the_first(tmp_path: Path, said: list[str]) -> None:
    ranks = Ranks(3)

    def body(rank: int) -> Path | None:
        files = CountingFiles(1, failing()) if rank == 2 else Files()
        return CheckpointManager(ranks.store(rank, tmp_path, files)).save(1, Content(), meta={})

    assert ranks.run(body) == [None] * 3
    assert sorted(line.partition(":")[0] for line in said) == [
        f"CHECKPOINT 1 WAS NOT SAVED on rank {rank}" for rank in (0, 2)
    ]


def test_a_full_disk_met_by_a_library_in_rust_is_one_too(tmp_path: Path, said: list[str]) -> None:
    def write_model(folder: Path) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    manager = CheckpointManager(Store(tmp_path))
    assert manager.save(1, Content(write_model=write_model), meta={}) is None
    assert len(said) == 1


def test_a_real_limit_of_the_system(tmp_path: Path) -> None:
    """A file size limit set in a process of its own, met by the real write call. What it prints goes into a pipe."""
    script = tmp_path / "limited.py"
    script.write_text(
        "import resource, signal, sys; from pathlib import Path; from tests.checkpoint.faults import save, newest\n"
        "root = Path(sys.argv[1]); save(root, 1); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (90, 90)); assert save(root, 2) is None; assert newest(root) == 1"
    )
    with Started(script, tmp_path / "run") as process:
        code, said = process.end()
    assert code == 0, said
    assert "CHECKPOINT 2 WAS NOT SAVED" in said
    assert "File too large" in said


class SmallDisk(Files):
    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self, path: Path) -> int:
        return 0 if (path / "tmp-checkpoint-9").exists() else self.free


def test_room_is_counted_before_anything_is_written(tmp_path: Path, said: list[str]) -> None:
    state = {"moments": torch.zeros(1 << 20)}  # 4 MiB
    content = Content({"optimizer": state}, {"rng": state})
    needed = 2 * (4 << 20) + (1 << 20)
    short = CheckpointManager(Store(tmp_path, files=SmallDisk(needed - 1)))
    assert short.save(1, content, meta={}) is None
    assert f"needs {needed:,} bytes and {needed - 1:,} are free" in said[0]
    (tmp_path / "tmp-checkpoint-9").mkdir()  # of an interrupted save
    enough = CheckpointManager(Store(tmp_path, files=SmallDisk(needed)))
    assert enough.save(1, replace(content, other_bytes=1), meta={}) is None
    assert enough.save(1, content, meta={}) == tmp_path / "checkpoint-1"


def test_a_mistake_in_the_program_is_not_a_full_disk(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manager = CheckpointManager(Store(tmp_path))
    with pytest.raises(CheckpointError, match=r"'hook' is a builtins\.function|'hook' is a .*function"):
        manager.save(2, Content({"callback": {"hook": lambda: 0}}), meta={})
    with pytest.raises(CheckpointError, match="meta of a checkpoint holds tensors"):
        manager.save(2, Content(), meta={"a": torch.ones(1)})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_saving_a_step_again_takes_its_place(tmp_path: Path) -> None:
    save(tmp_path, 5)
    manager = CheckpointManager(Store(tmp_path))
    path = manager.save(5, Content({"optimizer": state_of(50)}), meta={})
    assert path is not None
    assert manager.load(path).shared("optimizer")["step"] == 50
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-5"]


def test_ranks_keep_their_own_parts_and_agree(tmp_path: Path) -> None:
    ranks = Ranks(3)

    def body(rank: int) -> Path | None:
        manager = CheckpointManager(ranks.store(rank, tmp_path), Retention(1))
        for step in (1, 2):
            parts = {"rng": {"rank": rank, "state": torch.tensor([rank])}}
            path = manager.save(step, Content({"a": {"rank": rank}}, parts), meta={})
        return path

    assert ranks.run(body) == [tmp_path / "checkpoint-2"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    checkpoint = CheckpointManager(Store(tmp_path)).load(tmp_path / "checkpoint-2")
    assert checkpoint.shared("a") == {"rank": 0}
    assert [int(checkpoint.per_rank("rng", rank)["state"]) for rank in range(3)] == [0, 1, 2]
    with pytest.raises(CheckpointError, match=r"saved by 3 rank\(s\); it has nothing of rank 3"):
        checkpoint.per_rank("rng", 3)


@pytest.mark.dist
def test_real_processes_vote(tmp_path: Path) -> None:
    said = launch(2, Path(__file__).with_name("gloo_save.py"), tmp_path)
    for rank in range(2):
        saved, listed = json.loads((tmp_path / f"result-{rank}").read_text())
        assert saved == ["checkpoint-1", None, "checkpoint-3"]
        assert listed == [3]
    assert "CHECKPOINT 2 WAS NOT SAVED on rank 1: [Errno 28]" in said
    checkpoint = CheckpointManager(Store(tmp_path)).load(tmp_path / "checkpoint-3")
    assert [checkpoint.per_rank("rng", rank)["rank"] for rank in range(2)] == [0, 1]
