"""Checkpoints in a remote folder that fails, and processes that end while they write to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem
from tests.checkpoint.faults import CountingFiles, state_of

from windlass.checkpoint import history
from windlass.checkpoint.content import Content
from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.mirrored import MirroredStore
from windlass.checkpoint.opening import open_on_all
from windlass.checkpoint.remote import Mirror, RemoteFolder
from windlass.checkpoint.retention import Retention
from windlass.core.errors import CheckpointError
from windlass.core.upload_log import read_uploads
from windlass.dist.gang import Gang


class Killed(BaseException):
    """The process ends here: nothing after it happens."""


class Faulty(RemoteFolder):
    """Fails at the operation of number `at` (from 1), and says which there were."""

    at, fault = 0, ConnectionError
    operations: list[str] = []

    def before(self, operation: str, name: str) -> None:
        Faulty.operations.append(f"{operation} {name}")
        if len(Faulty.operations) == Faulty.at:
            raise Faulty.fault("the line is dead")

    @classmethod
    def arm(cls, at: int = 0, fault: type[BaseException] = ConnectionError) -> None:
        cls.at, cls.fault, cls.operations = at, fault, []


def store_at(root: Path, url: str) -> MirroredStore:
    remote = Faulty(url)
    return MirroredStore(Mirror(root, remote, loose=remote))


def save(root: Path, url: str, step: int, limit: int | None = 1, value: int | None = None) -> Path | None:
    (root / "metrics.jsonl").parent.mkdir(parents=True, exist_ok=True)
    (root / "metrics.jsonl").write_text(f"{step}\n")
    content = Content({"optimizer": state_of(value or step)}, {"rng": state_of(step)})
    return CheckpointManager(store_at(root, url), Retention(limit=limit)).save(step, content, meta={})


def newest(root: Path, url: str) -> Checkpoint:
    return open_on_all(store_at(root, url), True, Gang())


@pytest.fixture
def url(tmp_path: Path) -> str:
    Faulty.arm()
    return f"file://{tmp_path}/bucket/run"


def test_round_trip_in_memory(tmp_path: Path) -> None:
    Faulty.arm()
    url = f"memory://bucket-{tmp_path.name}/run"
    save(tmp_path / "a", url, 3)
    checkpoint = newest(tmp_path / "b", url)
    assert checkpoint.shared("optimizer")["step"] == 3
    assert checkpoint.per_rank("rng", 0)["step"] == 3
    assert (tmp_path / "b" / "metrics.jsonl").read_text() == "3\n"
    Faulty.arm()
    save(tmp_path / "b", url, 4)
    removals = [operation for operation in Faulty.operations if operation.startswith("remove")]
    assert removals == ["remove checkpoint-3/manifest.json", "remove checkpoint-3"]
    fsspec.filesystem("memory").rm(f"/bucket-{tmp_path.name}", recursive=True)


def test_a_serial_follows_those_of_the_remote_folder(tmp_path: Path, url: str) -> None:
    """A new run on another machine, whose own folder is empty."""
    for machine, step in (("a", 3), ("b", 1)):
        save(tmp_path / machine, url, step, limit=None)
    assert newest(tmp_path / "c", url).step == 1


def test_an_error_of_a_service_does_not_show_credentials(url: str) -> None:
    class Talkative(RemoteFolder):
        def before(self, operation: str, name: str) -> None:
            raise ConnectionError("no answer of https://me:secret@host/run")

    with pytest.raises(OSError, match="no answer of") as caught:
        Talkative(url).names()
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None, "a traceback would show it"


def test_what_is_fetched_is_durable_under_its_name(tmp_path: Path, url: str) -> None:
    save(tmp_path / "a", url, 3)
    (tmp_path / "b" / "checkpoint-3").mkdir(parents=True)  # another program's
    (tmp_path / "b" / "checkpoint-3" / "file").touch()
    store = MirroredStore(Mirror(tmp_path / "b", Faulty(url)), files=(files := CountingFiles()))
    store.resume_point(True)
    assert files.operations[-4:] == [
        "fsync_folder tmp-checkpoint-3",
        "rename checkpoint-3",
        "rename tmp-checkpoint-3",
        "fsync_folder b",
    ]
    assert (tmp_path / "b" / "checkpoint-3.aside").exists()


def test_an_upload_of_which_a_part_arrives_has_failed(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    system = (remote := Faulty(url))._system
    monkeypatch.setattr(system, "put_file", lambda source, target: system.pipe_file(target, b"123"))
    with pytest.raises(OSError, match="3 of 5 bytes arrived"):
        remote.put(tmp_path / "a", "a")


def count(work: Callable[[], object]) -> int:
    Faulty.arm()
    work()
    return len(Faulty.operations)


@pytest.mark.parametrize("fault", [ConnectionError, Killed])
@pytest.mark.parametrize("step", [2, 1], ids=["next-step", "same-step"])
def test_a_whole_one_stands_whatever_fails(tmp_path: Path, step: int, fault: type[BaseException]) -> None:
    """The line fails, or the process ends, at each operation of a save and its retention."""

    def url_of(case: object) -> str:
        return f"file://{tmp_path}/bucket-{case}/run"

    def second(case: object) -> None:
        save(tmp_path / f"root-{case}", url_of(case), step, value=20)

    Faulty.arm()
    save(tmp_path / "root-all", url_of("all"), 1)
    total = count(lambda: second("all"))
    assert total > 10
    for at in range(1, total + 1):
        Faulty.arm()
        save(tmp_path / f"root-{at}", url_of(at), 1)
        Faulty.arm(at, fault)
        try:
            second(at)
        except Killed:
            assert fault is Killed
        uploading = any(operation.startswith("upload") for operation in Faulty.operations)
        Faulty.arm()
        # Another machine has nothing but the remote folder; on this one the commit came before the upload.
        there = newest(tmp_path / f"other-{at}", url_of(at)).shared("optimizer")["step"]
        here = newest(tmp_path / f"root-{at}", url_of(at)).shared("optimizer")["step"]
        assert (there, here) in [(1, 1), (1, 20), (20, 20)], at
        assert here == 20 or not uploading, at
        # And the next save of either ends in order.
        save(tmp_path / f"root-{at}", url_of(at), 3)
        assert RemoteFolder(url_of(at)).names() == ["checkpoint-3", "metrics.jsonl"], at


def test_ended_between_data_and_manifest(tmp_path: Path, url: str) -> None:
    save(tmp_path / "a", url, 1)

    class Dies(Faulty):
        def before(self, operation: str, name: str) -> None:
            if (operation, name) == ("upload", "checkpoint-2/manifest.json"):
                raise Killed

    mirror = Mirror(tmp_path / "a", Dies(url))
    with pytest.raises(Killed):
        CheckpointManager(MirroredStore(mirror)).save(2, Content({"optimizer": state_of(2)}), meta={})
    assert "optimizer.json" in RemoteFolder(url).names("checkpoint-2")
    assert newest(tmp_path / "b", url).step == 1
    save(tmp_path / "b", url, 2, value=7)
    assert newest(tmp_path / "c", url).shared("optimizer")["step"] == 7


def test_damage_there_is_found_here(tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        save(tmp_path / "a", url, step, limit=None)
    path = tmp_path / "bucket" / "run" / "checkpoint-2" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert newest(tmp_path / "b", url).step == 1
    assert "checkpoint-2/optimizer.safetensors is damaged" in caplog.text
    assert not (tmp_path / "b" / "checkpoint-2").exists(), "a whole one of that name would be gone"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoint-2/optimizer.safetensors is damaged"):
        store_at(tmp_path / "c", url).verify(tmp_path / "c" / "checkpoint-2")
    assert newest(tmp_path / "a", url).step == 2, "this machine has its own"


def test_no_more_of_a_file_is_downloaded_than_its_manifest_allows(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "a", url, 1)
    save(tmp_path / "a", url, 2, limit=None)
    path = tmp_path / "bucket" / "run" / "checkpoint-2" / "optimizer.safetensors"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.truncate(size + (1 << 40))  # takes no room on the disk, and would here
    assert newest(tmp_path / "b", url).step == 1
    assert f"optimizer.safetensors is damaged: it has more than {size:,} bytes" in caplog.text


def test_the_later_commit_of_a_step_counts(tmp_path: Path, url: str) -> None:
    save(tmp_path / "a", url, 1, value=10)
    newest(tmp_path / "b", url)
    save(tmp_path / "b", url, 1, value=20)
    assert RemoteFolder(url).names() == ["checkpoint-1-again-1", "metrics.jsonl"]
    assert newest(tmp_path / "a", url).shared("optimizer")["step"] == 20
    assert not list((tmp_path / "a").glob("replaced-*"))


def test_a_folder_that_cannot_be_reached_is_no_empty_one(tmp_path: Path, url: str) -> None:
    save(tmp_path / "a", url, 1)
    Faulty.arm(1)
    with pytest.raises(CheckpointError, match=r"remote folder cannot be read.*the line is dead"):
        newest(tmp_path / "a", url)


def test_a_manifest_that_cannot_be_asked_for_is_not_absent(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`isfile` of the file systems of services returns False for every error."""
    save(tmp_path / "a", url, 1)
    store = store_at(tmp_path / "b", url)
    system, info = store.mirror.remote._system, store.mirror.remote._system.info

    def dead(path: str) -> dict[str, object]:
        if str(path).endswith("manifest.json"):
            raise ConnectionError("the line is dead")
        found: dict[str, object] = info(path)
        return found

    monkeypatch.setattr(system, "info", dead)
    monkeypatch.setattr(system, "isfile", lambda path: AbstractFileSystem.isfile(system, path))
    with pytest.raises(CheckpointError, match=r"remote folder cannot be read.*the line is dead"):
        store.is_fresh()
    # A step that is saved again must not take the folder of the whole one for the rest of an upload.
    assert CheckpointManager(store).save(1, Content({"optimizer": state_of(2)}), meta={}) is None
    assert newest(tmp_path / "c", url).shared("optimizer")["step"] == 1


def test_retention_reaches_what_another_machine_saved(tmp_path: Path, url: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path / "a", url, step, limit=None)
    save(tmp_path / "b", url, 4, limit=2)
    assert RemoteFolder(url).names() == ["checkpoint-3", "checkpoint-4", "metrics.jsonl"]


def test_what_is_whole_here_is_read_while_the_line_is_dead(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Going back to a checkpoint of the run, or to its best, does not depend on the remote folder."""
    path = save(tmp_path / "a", url, 1)
    assert path is not None
    Faulty.arm(1)
    assert store_at(tmp_path / "a", url).verify(path).step == 1
    assert "the line is dead" in caplog.text
    Faulty.arm(1)
    with pytest.raises(CheckpointError, match="the line is dead"):
        store_at(tmp_path / "b", url).verify(tmp_path / "b" / "checkpoint-1")


def test_what_other_machines_left_is_no_fresh_start(tmp_path: Path, url: str) -> None:
    assert store_at(tmp_path / "a", url).is_fresh()
    save(tmp_path / "a", f"{url}/node-00001", 1)
    store = store_at(tmp_path / "b", url)
    assert not store.is_fresh()
    with pytest.raises(CheckpointError, match="written by machines with disks of their own"):
        store.resume_point(True)


def test_weights_in_another_number_of_files_replace_those_of_before(tmp_path: Path, url: str) -> None:
    """`from_pretrained` would read the old single file, not the new ones."""
    split = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    for number, names in enumerate(({"model.safetensors", "notes.txt"}, split, {"model.safetensors"})):
        machine = tmp_path / str(number)
        machine.mkdir()
        for name in names:
            (machine / name).touch()
        store_at(machine, url).mirror.upload_loose()
        assert {*RemoteFolder(url).names()} == {*names, "notes.txt"}


def test_what_completes_a_folder_is_uploaded_after_what_it_completes(tmp_path: Path, url: str) -> None:
    """A machine that dies between the two would leave a base without weights, which is taken for a whole one."""
    for time, name in enumerate(("model.safetensors", "base_recipe.json")):
        path = tmp_path / "base" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
        os.utime(path, (time, time))
    store_at(tmp_path, url).mirror.upload_loose()
    sent = [done.rpartition("/")[2] for done in Faulty.operations if done.startswith("upload base/")]
    assert sent == ["model.safetensors", "base_recipe.json"]


def test_segments_of_a_long_history_are_uploaded_once(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "SEGMENT_ROWS", 5)
    keeper, rows = history.HistoryKeeper(), [{"step": number} for number in range(12)]
    manager = CheckpointManager(store_at(tmp_path / "a", url), Retention(limit=1))
    for step in (1, 2, 3):
        planned = keeper.plan({"global_step": step, "log_history": rows})
        folder = manager.save(step, Content(shared=planned.states, history=planned), meta={})
        assert folder is not None
        keeper.saved(folder)
        rows += [{"step": number} for number in range(12 + step, 13 + step)]
    uploads = [done for done in Faulty.operations if done.startswith("upload") and ".jsonl" in done]
    assert [name.rpartition("/")[2] for name in uploads if "log_history" in name] == ["000000000.jsonl"]
    assert history.complete_state(newest(tmp_path / "b", url))["log_history"] == rows[:14]


def test_uploads_and_their_failures_are_noted_beside_the_run(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Faulty, operation: str, name: str) -> None:
        if operation == "upload" and "checkpoint-2" in name:
            raise ConnectionError("the line is dead")

    save(tmp_path / "run", url, 1)
    monkeypatch.setattr(Faulty, "before", refuse)
    save(tmp_path / "run", url, 2)
    found = [(row["what"], row["step"], bool(row["problem"])) for row in read_uploads(tmp_path / "run")]
    assert found == [("checkpoint-1", 1, False), ("checkpoint-2", 2, True)]
