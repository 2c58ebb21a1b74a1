"""Checkpoints made by an enemy: nothing in them runs, none fills the memory, and the error names the file."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.faults import save, state_of
from tests.checkpoint.test_faults import in_child

from windlass.checkpoint.files import Files
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.manifest import MANIFEST_NAME
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError

WITNESS = "WINDLASS_TEST_EXECUTED"


class Bomb:
    """Unpickled anywhere, it tells."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.putenv, (WITNESS, "1")


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb()))


def zipped(path: Path) -> None:
    """What `torch.save` writes is a zip file with a pickle in it; this one also unpacks to many times its size."""
    path.write_bytes(_zip_bomb())


@functools.cache
def _zip_bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
        archive.writestr("archive/data/0", bytes(1 << 24))
    return buffer.getvalue()


def saved_by_torch(path: Path) -> None:
    torch.save({"step": 1}, path)


def absurd_header(path: Path) -> None:
    path.write_bytes(((1 << 63) - 1).to_bytes(8, "little") + b'{"a": 1}')


def absurdly_long_header(path: Path) -> None:
    with path.open("wb") as file:
        file.write((1 << 28).to_bytes(8, "little"))
        file.truncate((1 << 28) + 8)  # sparse: takes no room on disk


def huge_json(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"[")
        file.truncate(1 << 28)


def deep_json(path: Path) -> None:
    path.write_bytes(b"[" * 1_000_000)


def wide_references(path: Path) -> None:
    """A small file that asks for one tensor many times."""
    path.write_bytes(b'{"a": [' + b'{"$tensor": "weights"},' * 100_000 + b"0]}")


def named_class(path: Path) -> None:
    path.write_text('{"$class": "os.system", "_instantiator": "subprocess.run", "args": ["true"]}')


CORPUS = [
    pickled,
    zipped,
    saved_by_torch,
    absurd_header,
    absurdly_long_header,
    huge_json,
    deep_json,
    wide_references,
    named_class,
]


def reseal(folder: Path, change: Callable[[dict[str, Any]], None] = lambda body: None) -> None:
    """Make the manifest fit what lies in the folder, as an enemy who knows the layout would."""
    body = json.loads((folder / MANIFEST_NAME).read_text())
    for name in body["files"]:
        entry = Files().digest(folder / name)
        body["files"][name] = {"size": entry.size, "sha256": entry.sha256}
    change(body)
    body.pop("sha256", None)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    (folder / MANIFEST_NAME).write_text(
        json.dumps(body | {"sha256": hashlib.sha256(text.encode()).hexdigest()})
    )


def read_everything(folder: Path) -> None:
    checkpoint = CheckpointManager(Store(folder.parent)).load(folder)
    checkpoint.shared("optimizer")
    checkpoint.per_rank("rng", 0)
    checkpoint.load_weights(torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 3, bias=False)}))


def read_in_small_memory(folder: Path, name: str) -> None:
    """In a child that may take 3 GiB more, where a wrong step would end it; exits 0 when the right error came."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), used + (3 << 30)))
    try:
        read_everything(folder)
    except CheckpointError as error:
        os._exit(0 if name.split(".")[0] in str(error) else 3)
    os._exit(2)


NAMES = [
    "model.safetensors",
    "optimizer.json",
    "optimizer.safetensors",
    "rank-00000.json",
    "rank-00000.safetensors",
]


# The two files of 256 MB are hashed in one place each, not in five.
LARGE = {huge_json: "optimizer.json", absurdly_long_header: "model.safetensors"}
ATTACKS = [(attack, name) for attack in CORPUS for name in NAMES if LARGE.get(attack, name) == name]


@pytest.mark.parametrize(("attack", "name"), ATTACKS)
def test_every_file_with_a_fitting_manifest(
    attack: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    attack(tmp_path / "checkpoint-1" / name)
    reseal(tmp_path / "checkpoint-1")
    assert in_child(lambda: read_in_small_memory(tmp_path / "checkpoint-1", name)) == 0
    assert WITNESS not in os.environ


@pytest.mark.parametrize("attack", CORPUS)
def test_the_manifest_itself(attack: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path, 1)
    attack(tmp_path / "checkpoint-1" / MANIFEST_NAME)
    assert in_child(lambda: read_in_small_memory(tmp_path / "checkpoint-1", MANIFEST_NAME)) == 0
    found, skipped = Store(tmp_path).newest_verified()
    assert found is None
    assert MANIFEST_NAME in skipped[0][1]


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "a/../../secret", "./x", "a//b", "", "..", "c:\\x", "a\\..\\b", "a\0b"],
)
def test_paths_in_a_manifest_stay_inside(name: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "secret").write_text("x")
    digest = hashlib.sha256(b"x").hexdigest()
    reseal(
        tmp_path / "checkpoint-1", lambda body: body["files"].update({name: {"size": 1, "sha256": digest}})
    )
    with pytest.raises(CheckpointError, match=r"manifest\.json names .* does not lie inside"):
        Store(tmp_path).verify(tmp_path / "checkpoint-1")


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"}, {"version": 2}, {"version": "1"}, {"version": True}, {"step": "1"}, {"step": -1},
        {"step": True}, {"world_size": 0}, {"files": []}, {"files": {"x": 3}},
        {"files": {"x": {"size": -1, "sha256": "0" * 64}}},
        {"files": {"x": {"size": 1, "sha256": "zz"}}},
        {"meta": []}, {"meta": {"a": {"$tensor": "x"}}}, {"meta": {"a": {"$class": "x"}}},
        {"meta": {"$tuple": []}}, {"meta": {"$float": "nan"}},
        {"world_size": 1 << 62}, {"node": 0, "nodes": 2}, {"node": 0, "nodes": 1 << 62, "world_size": 4},
    ],
)  # fmt: skip
def test_a_malformed_manifest_is_one_clear_error(change: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, 1)
    reseal(tmp_path / "checkpoint-1", lambda body: body.update(change))
    with pytest.raises(CheckpointError, match="Can't find a valid checkpoint at"):
        Store(tmp_path).verify(tmp_path / "checkpoint-1")


def test_a_linked_folder_inside_leads_nowhere(tmp_path: Path) -> None:
    save(tmp_path, 1)
    tokenizer = tmp_path / "checkpoint-1" / "tokenizer"
    tokenizer.rename(tmp_path / "elsewhere")
    tokenizer.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="tokenizer is a symbolic link"):
        Store(tmp_path).verify(tmp_path / "checkpoint-1")


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "checkpoint-1" / MANIFEST_NAME
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a plain file"):
        Store(tmp_path).verify(path.parent)


def test_removal_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    run = tmp_path / "run"
    save(run, 1)
    (run / "checkpoint-1" / "link").symlink_to(outside)
    (run / "tmp-checkpoint-7").symlink_to(outside)
    save(run, 2)
    assert [path.name for path in run.iterdir()] == ["checkpoint-2"]
    assert (outside / "precious").exists()


def test_a_part_that_is_not_in_the_manifest_is_not_read(tmp_path: Path) -> None:
    from windlass.checkpoint.codec import save_state

    save(tmp_path, 1)
    save_state(tmp_path / "checkpoint-1" / "extra", state_of(1))
    checkpoint = CheckpointManager(Store(tmp_path)).load(tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"no part 'extra' \(extra\.json is not in its manifest\)"):
        checkpoint.shared("extra")
