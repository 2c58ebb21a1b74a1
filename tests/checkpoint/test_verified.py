"""Nothing is loaded that was not verified, and nothing is verified twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
import torch
from tests.checkpoint.faults import save

from windlass.checkpoint import files
from windlass.checkpoint.files import FileEntry, Files, Fingerprint
from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.opening import received
from windlass.checkpoint.store import Store
from windlass.checkpoint.stored import load_folder
from windlass.checkpoint.verified import VerifiedFiles, hand_over
from windlass.core.errors import CheckpointError


class Hashes(Files):
    """Counts the files that are hashed."""

    def __init__(self) -> None:
        self.hashed: list[str] = []

    def check(self, path: Path, entry: FileEntry) -> Fingerprint:
        self.hashed.append(path.name)
        return super().check(path, entry)


def layer() -> torch.nn.Module:
    return torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 3, bias=False)})


def load_all(checkpoint: Checkpoint, model: torch.nn.Module | None = None) -> None:
    checkpoint.load_weights(model or layer())
    checkpoint.shared("optimizer")
    checkpoint.per_rank("rng", 0)
    checkpoint.read("config.json")


def flip(path: Path) -> None:
    """Change one byte in place, and hide it as well as a program can."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def as_received(root: Path, files: Files | None = None) -> Checkpoint:
    """As another rank opens it: by what rank 0 sends, which passes through JSON."""
    return received(json.loads(json.dumps(hand_over(Store(root).resume_point(True)))), files or Files())


def opened(root: Path, files: Files | None = None) -> Checkpoint:
    return CheckpointManager(Store(root, files=files)).load(root / "checkpoint-3")


def test_each_file_is_hashed_once_by_the_rank_that_chose_and_by_no_other(tmp_path: Path) -> None:
    save(tmp_path, 3)
    first, other = Hashes(), Hashes()
    load_all(opened(tmp_path, first))
    assert sorted(first.hashed) == sorted(Path(name).name for name in opened(tmp_path).info.files)
    load_all(as_received(tmp_path, other))
    assert other.hashed == []


def test_what_is_received_is_what_was_sent(tmp_path: Path) -> None:
    save(tmp_path, 3)
    assert as_received(tmp_path).info == opened(tmp_path).info


@pytest.mark.parametrize("open_it", [opened, as_received])
@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.json", "optimizer.safetensors", "rank-00000.json", "rank-00000.safetensors",
     "config.json"],
)  # fmt: skip
def test_a_byte_flipped_after_the_verification_is_found(
    name: str, open_it: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    save(tmp_path, 3)
    checkpoint = open_it(tmp_path)
    flip(tmp_path / "checkpoint-3" / name)
    model = layer()
    before = model.state_dict()["layer.weight"].clone()
    with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
        load_all(checkpoint, model)
    if name == "model.safetensors":
        assert torch.equal(model.state_dict()["layer.weight"], before)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 3)
    checkpoint = opened(tmp_path)
    path = tmp_path / "checkpoint-3" / "optimizer.json"

    def load() -> None:
        with VerifiedFiles(checkpoint.info, Files()).reading(path) as file:
            file.read(4)
            flip(path)

    with pytest.raises(CheckpointError, match=r"optimizer\.json changed while it was read"):
        load()


def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1")
    entry, digest = Files().digest(path), files.digest_of

    def changed(file: FileIO) -> FileEntry:
        found = digest(file)
        path.write_bytes(b"12")
        return found

    monkeypatch.setattr(files, "digest_of", changed)
    with pytest.raises(CheckpointError, match=r"a is damaged"):
        Files().check(path, entry)


def test_files_that_stand_otherwise_are_hashed_not_refused(tmp_path: Path) -> None:
    """Another machine may see other inodes and times: then it pays for its own verification."""
    save(tmp_path, 3)
    handover = hand_over(Store(tmp_path).resume_point(True))
    handover["seen"] = {name: [0, 0, 0, 0] for name in handover["seen"]}
    hashes = Hashes()
    checkpoint = received(handover, hashes)
    load_all(checkpoint)
    load_all(checkpoint)
    assert sorted(hashes.hashed) == [
        "config.json", "model.safetensors", "optimizer.json", "optimizer.safetensors", "rank-00000.json",
        "rank-00000.safetensors",
    ]  # fmt: skip


def test_a_file_beside_the_saved_ones_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, 3)
    checkpoint = opened(tmp_path)
    (tmp_path / "checkpoint-3" / "training_args.json").write_text("{}")
    assert checkpoint.read("training_args.json") is None
    with pytest.raises(CheckpointError, match=r"extra\.json is not in the checkpoint's manifest"):
        with VerifiedFiles(checkpoint.info, Files()).reading(tmp_path / "checkpoint-3" / "extra.json"):
            pass


def test_the_folder_of_a_checkpoint_is_verified_too(tmp_path: Path) -> None:
    """As the best weights are loaded at the end of a run."""
    path = save(tmp_path, 3)
    assert path is not None
    load_folder(path, layer())
    flip(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_folder(path, layer())
