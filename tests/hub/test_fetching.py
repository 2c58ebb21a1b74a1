"""Checkpoints that are resumed from the Hub."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from tests.hub.server import Fault, Hub
from tests.hub.test_publisher import content
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.checkpoint.manifest import MAX_MANIFEST_BYTES, manifest_bytes
from windlass.core.errors import CheckpointError, ConfigError
from windlass.hub.client import HubClient
from windlass.hub.fetching import fetch, fetched_before
from windlass.hub.publisher import HubSettings, Publisher
from windlass.hub.staging import STAGING


@pytest.fixture
def published(hub: Hub, token: str, tmp_path: Path) -> Path:
    """A checkpoint that is on the Hub too."""
    args = arguments(tmp_path / "run", max_steps=1, save_strategy="steps", save_steps=1)
    Trainer(Net(), args, train_dataset=rows(16)).train()
    publisher = Publisher(HubSettings("run", token, strategy="checkpoint"), tmp_path)
    publisher.saved(tmp_path / "run/checkpoint-1")
    assert publisher.finish()
    return tmp_path / "run/checkpoint-1"


def test_a_checkpoint_comes_back_to_the_bit_and_only_once(
    hub: Hub, token: str, published: Path, tmp_path: Path
) -> None:
    path = fetch("hub:someone/run", token, tmp_path)
    assert path.name == "checkpoint-1"
    assert content(path) == content(published)
    asked = len(hub.requests)
    for same in ("@main/last-checkpoint", "/last-checkpoint/", "/"):
        assert fetch(f"hub:someone/run{same}", token, tmp_path) == path
    assert not any("optimizer" in request for request in hub.requests[asked:])
    os.truncate(path / "optimizer.safetensors", 9)  # as after a power failure
    assert content(fetch("hub:someone/run", token, tmp_path)) == content(published)


def test_what_a_killed_download_left_is_removed(
    hub: Hub, token: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive = HubClient.fetch

    def killed(client: HubClient, name: str, revision: str, folder: Path) -> Path:
        arrive(client, name, revision, folder)
        os._exit(9)

    with monkeypatch.context() as patched:
        patched.setattr(HubClient, "fetch", killed)
        child = os.fork()
        if child == 0:
            fetch("hub:someone/run", token, tmp_path)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (left,) = (tmp_path / STAGING).iterdir()
    path = fetch("hub:someone/run", token, tmp_path)
    assert content(path) == content(published)
    assert not left.exists()


def test_other_processes_take_what_the_first_one_fetched(
    hub: Hub, token: str, published: Path, tmp_path: Path
) -> None:
    """Each asking for itself, they could resume different checkpoints: a run that goes on moves the branch."""
    address = "hub:someone/run"
    with pytest.raises(CheckpointError, match="was not downloaded"):
        fetched_before(address, tmp_path)
    path = fetch(address, token, tmp_path)
    asked = len(hub.requests)
    assert fetched_before(address, tmp_path) == path
    assert len(hub.requests) == asked


def test_machines_that_share_a_disk_download_at_once(
    hub: Hub, token: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first of them has put in its place stays there: its ranks read it."""
    arrive, others = HubClient.fetch, list[int]()

    def meanwhile(client: HubClient, name: str, revision: str, folder: Path) -> Path:
        if not name.endswith("manifest.json") and not others:
            others.append(0)  # that of the other machine arrives undisturbed
            others[0] = fetch("hub:someone/run", token, tmp_path).stat().st_ino
        return arrive(client, name, revision, folder)

    monkeypatch.setattr(HubClient, "fetch", meanwhile)
    path = fetch("hub:someone/run", token, tmp_path)
    assert path.stat().st_ino == others[0]
    assert content(path) == content(published)


def test_a_folder_that_cannot_be_written_is_an_error_for_all_ranks(
    hub: Hub, token: str, published: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be downloaded into .*file/run"):
        fetch("hub:someone/run", token, tmp_path / "file" / "run")


@pytest.mark.parametrize(
    "note", ["", "[]", '{"hub:someone/run": 1}', '{"hub:someone/run": "../../other"}', "[" * 9000]
)
def test_a_damaged_note_of_what_was_fetched_names_no_folder(note: str, tmp_path: Path) -> None:
    (tmp_path / STAGING).mkdir()
    (tmp_path / STAGING / "fetched.json").write_text(note)
    with pytest.raises(CheckpointError, match="was not downloaded"):
        fetched_before("hub:someone/run", tmp_path)


def test_a_branch_with_a_slash_is_named_with_its_escape(
    hub: Hub, token: str, published: Path, tmp_path: Path
) -> None:
    repository = hub.repositories["someone/run"]
    repository.branches["try/2"] = repository.branches["main"]
    assert fetch("hub:someone/run@try%2F2", token, tmp_path).name == "checkpoint-1"


def test_what_arrives_damaged_is_not_resumed(hub: Hub, token: str, published: Path, tmp_path: Path) -> None:
    hub.faults = [Fault("GET last-checkpoint/optimizer.safetensors", lie=True, times=0)]
    args = arguments(tmp_path / "again", max_steps=2, hub_token=token)
    trainer = Trainer(Net(), args, train_dataset=rows(16))
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors"):
        trainer.train(resume_from_checkpoint="hub:someone/run")


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("hub:run", ConfigError, "hub:OWNER/NAME"),
        (
            "hub:someone/absent",
            CheckpointError,
            "someone/absent: no such repository, or the token may not read it",
        ),
        ("hub:someone/run@absent", CheckpointError, "cannot read .* no such branch, tag or commit"),
        ("hub:someone/run/checkpoint-7", CheckpointError, "no checkpoint in checkpoint-7"),
    ],
)
def test_an_address_without_a_checkpoint(
    hub: Hub, token: str, published: Path, tmp_path: Path, address: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        fetch(address, token, tmp_path)


def put(hub: Hub, name: str, content: bytes | None) -> None:
    """A file of the checkpoint on the Hub is replaced or removed."""
    value: dict[str, str] = {"path": f"last-checkpoint/{name}"}
    kind = "deletedFile"
    if content is not None:
        kind, value["content"] = "file", base64.b64encode(content).decode()
    hub.commit(hub.repositories["someone/run"], "main", [{"key": kind, "value": value}])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("manifest.json", bytes(MAX_MANIFEST_BYTES + 1), "a manifest.json of 16,777,217 bytes; at most 16,777,216"),
        ("optimizer.safetensors", bytes(1 << 20), "optimizer.safetensors has 1,048,576 bytes and was saved with"),
        ("optimizer.safetensors", None, "optimizer.safetensors is missing"),
        ("manifest.json", manifest_bytes(10**300, 1, {}, {}, 1), "step and world_size must be whole numbers"),
        ("manifest.json", b"{}", "is not the manifest of a Windlass checkpoint"),
    ],
)  # fmt: skip
def test_a_download_is_bounded_by_its_manifest_before_it_begins(
    hub: Hub, token: str, published: Path, tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    put(hub, name, content)
    asked = len(hub.requests)
    with pytest.raises(CheckpointError, match=words):
        fetch("hub:someone/run", token, tmp_path)
    assert not any("safetensors" in request for request in hub.requests[asked:])
    assert [path.name for path in (tmp_path / STAGING).iterdir()] == []
