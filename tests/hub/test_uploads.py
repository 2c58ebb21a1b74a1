"""Uploads beside training: what fails is tried again, and costs nothing but the upload."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from tests.hub.fixtures import end_uploads
from tests.hub.server import Fault, Hub

from windlass.core.upload_log import read_uploads
from windlass.hub import uploads as module
from windlass.hub.client import HubClient, HubError
from windlass.hub.staging import StagedFiles
from windlass.hub.uploads import Upload, Uploads


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES", (0.01,))


def upload(folder: Path, what: str = "a", **changes: str) -> Upload:
    files = StagedFiles(folder / what)
    (files.path / changes.get("replaces", "")).mkdir(exist_ok=True)
    (files.path / changes.get("replaces", "") / f"{what}.json").write_text(f'"{what}"')
    return Upload(what, f"upload {what}", files, later="later", **changes)


def client(token: str, repository: str = "run") -> HubClient:
    opened = HubClient(repository, token)
    opened.open()
    return opened


PASSING = [
    Fault("POST .*/commit/", status=500),
    Fault("POST .*/commit/", status=409),
    Fault("POST .*/commit/", status=429),
    Fault("POST .*/commit/", cut=True, times=2),
    Fault("POST .*/preupload/", cut=True),
]


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: f"{fault.match[6:13]} {fault.status or 'cut'}")
def test_a_passing_failure_is_tried_again(hub: Hub, token: str, tmp_path: Path, fault: Fault) -> None:
    one, running = upload(tmp_path), Uploads(client(token))
    hub.faults = [Fault(**vars(fault))]
    running.add(one)
    assert running.finish(60, print) == []
    assert one.commit.result().startswith(hub.url)
    assert hub.files("someone/run") == {"a.json": b'"a"'}
    assert not one.files.path.exists()


def test_after_ctrl_c_kept_its_thread_from_starting_a_later_upload_is_made(
    hub: Hub, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    running = Uploads(client(token))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            running.add(upload(tmp_path, "first"))
    running.add(upload(tmp_path, "later"))
    assert running.finish(20, print) == []
    assert hub.files("someone/run").keys() == {"first.json", "later.json"}


def test_an_upload_that_a_script_cancels_is_left_out(
    hub: Hub, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, may_go_on = threading.Event(), threading.Event()
    commit = HubClient.commit

    def held(*given: Any, **named: Any) -> str:
        entered.set()
        assert may_go_on.wait(60)
        return commit(*given, **named)

    running, uploads = Uploads(client(token), every=True), [upload(tmp_path, name) for name in "abc"]
    monkeypatch.setattr(HubClient, "commit", held)
    for one in uploads[:2]:
        running.add(one)
    assert entered.wait(60)
    assert [one.commit.cancel() for one in uploads[:2]] == [False, True]
    may_go_on.set()
    running.add(uploads[2])
    assert running.finish(60, print) == []
    assert hub.files("someone/run").keys() == {"a.json", "c.json"}
    assert not uploads[1].files.path.exists()


def test_the_ends_of_uploads_are_noted_beside_the_run(hub: Hub, token: str, tmp_path: Path) -> None:
    running = Uploads(client(token), every=True, folder=tmp_path)
    running.add(upload(tmp_path, "checkpoint-3"))
    assert running.finish(60, print) == []
    running.drop(upload(tmp_path, "checkpoint-6"), "the disk is full")
    found = [(row["what"], row["problem"]) for row in read_uploads(tmp_path)]
    assert found == [("checkpoint-3", ""), ("checkpoint-6", "the disk is full")]


def test_a_file_that_is_refused_once_is_tried_again(
    hub: Hub, token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The place for a file is handed out again with each attempt, so a refusal there may be one of its age."""
    one, running = upload(tmp_path), Uploads(client(token))
    (one.files.path / "w.safetensors").write_bytes(b"weights")
    hub.faults = [Fault("PUT /lfs/", status=403)]
    running.add(one)
    assert running.finish(60, print) == []
    assert hub.files("someone/run")["w.safetensors"] == b"weights"
    assert "403" in caplog.text


@pytest.mark.parametrize("status", [401, 403])
def test_a_lasting_failure_ends_the_upload(
    hub: Hub, token: str, tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, running = upload(tmp_path), upload(tmp_path, "b"), Uploads(client(token))
    hub.faults = [Fault("POST .*/commit/", status=status)]
    running.add(one)
    assert running.finish(60, print) == [one]
    with pytest.raises(HubError, match=f"told to answer {status}"):
        one.commit.result()
    assert token not in caplog.text
    assert "To upload it later: later" in caplog.text
    running.add(two)  # the Hub is asked again
    assert running.finish(60, print) == []
    assert hub.files("someone/run") == {"b.json": b'"b"'}


@pytest.mark.parametrize(("every", "statuses", "listed"), [
    (False, [401, None], []),  # its command would put the older one in the place of the newer
    (False, [401, 401], [1]),
    (False, [None, 401], [1]),
    (True, [401, None], [0]),
    (True, [401, 401], [0, 1]),
])  # fmt: skip
def test_what_a_newer_upload_replaces_is_not_listed(
    hub: Hub, token: str, tmp_path: Path, every: bool, statuses: list[int | None], listed: list[int]
) -> None:
    running, made = Uploads(client(token), every=every), list[Upload]()
    for number, status in enumerate(statuses):
        hub.faults = [] if status is None else [Fault("POST .*/commit/", status=status)]
        made.append(upload(tmp_path / str(number), f"checkpoint-{number}", place="root"))
        running.add(made[-1])
        wait([made[-1].commit])
    assert running.finish(60, print) == [made[number] for number in listed]


def test_a_reason_is_warned_of_once_until_an_upload_succeeds(
    hub: Hub, token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that saves often would report a token that has expired with each save."""
    running, warned = Uploads(client(token), every=True), list[int]()
    for number, status in enumerate([401, 401, 403, 401, None, 401, 500, 500]):
        hub.faults = [] if status is None else [Fault("POST .*/commit/", status=status)]
        one = upload(tmp_path / str(number))
        caplog.clear()
        running.add(one)
        wait([one.commit])
        if any(record.levelname == "WARNING" for record in caplog.records):
            warned.append(number)
    assert warned == [0, 2, 5, 6, 7]
    assert len(running.finish(60, print)) == 5


def test_one_that_cannot_begin_is_not_replaced_by_an_older_one(hub: Hub, token: str, tmp_path: Path) -> None:
    running, older, newer = Uploads(client(token)), upload(tmp_path / "0"), upload(tmp_path / "1")
    go_on = threading.Event()
    hub.faults = [Fault("POST .*/preupload/", hold=go_on)]
    running.add(older)
    running.drop(newer, "no space left")
    go_on.set()
    assert running.finish(60, print) == [newer]
    assert older.commit.result().startswith(hub.url)


def test_a_hub_that_stalls_is_given_up_at_the_end(
    hub: Hub, token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, running, lines, go_on = upload(tmp_path), Uploads(client(token)), list[str](), threading.Event()
    hub.faults = [Fault("POST .*/commit/", hold=go_on, cut=True)]
    running.add(one)
    while not any("/commit/" in request for request in hub.requests):
        pass  # it has come as far as that
    assert running.finish(0.2, lines.append) == [one]
    assert "waiting for 1 upload(s)" in lines[0]
    assert "did not end" in one.error
    two = upload(tmp_path, "b")
    running.add(two)  # while the Hub still holds on to the first one
    assert running.finish(60, print) == []
    assert two.commit.result().startswith(hub.url)
    go_on.set()
    end_uploads()
    assert "did not end" in one.error
    assert caplog.text == "", "what was dropped is not tried again"


def test_an_upload_that_is_given_up_while_it_is_prepared_removes_nothing(
    hub: Hub, token: str, tmp_path: Path
) -> None:
    """Its own files are gone by then, and what is there would be taken for files that the new one lacks."""
    running, entered, go_on = Uploads(client(token)), threading.Event(), threading.Event()
    running.add(upload(tmp_path / "older", replaces="last"))
    assert running.finish(60, print) == []

    def prepare() -> None:
        entered.set()
        assert go_on.wait(60)

    newer = upload(tmp_path / "newer", replaces="last")
    newer.prepare = prepare
    running.add(newer)
    assert entered.wait(60)
    assert running.finish(0.0, print) == [newer]
    go_on.set()
    end_uploads()
    assert hub.files("someone/run") == {"last/a.json": b'"a"'}


def test_an_upload_that_waits_is_replaced_by_a_newer_one(hub: Hub, token: str, tmp_path: Path) -> None:
    for every, commits in ((False, 3), (True, 4)):
        hub.reset()
        running = Uploads(client(token), every=every)
        go_on = threading.Event()
        hub.faults = [Fault("POST .*/preupload/", hold=go_on)]
        folders = [tmp_path / f"{every}{number}" for number in range(3)]
        made = [upload(folder, "a") for folder in folders]
        for number, one in enumerate(made):
            one.what = f"checkpoint-{number}"
            (one.files.path / "a.json").write_text(str(number))
            running.add(one)
            while number == 0 and not any("preupload" in request for request in hub.requests):
                pass  # the first one is under way
        go_on.set()
        assert running.finish(60, print) == []
        assert len(hub.repositories["someone/run"].commits) == commits
        assert hub.files("someone/run") == {"a.json": b"2"}
        assert made[1].commit.cancelled() is not every


def test_a_thread_ends_with_the_last_upload(hub: Hub, token: str, tmp_path: Path) -> None:
    """A process that makes many runs, as a search does, would have one more with each."""
    running = Uploads(client(token))
    for name in ("a", "b"):
        running.add(upload(tmp_path, name))
        assert running.finish(60, print) == []
        end_uploads()
    assert set(hub.files("someone/run")) == {"a.json", "b.json"}


def test_files_that_are_gone_leave_with_the_same_commit(hub: Hub, token: str, tmp_path: Path) -> None:
    running = Uploads(client(token))
    for name in ("a", "b"):
        running.add(upload(tmp_path / name, name, replaces="last"))
        assert running.finish(60, print) == []
    assert hub.files("someone/run") == {"last/b.json": b'"b"'}
    assert len(hub.repositories["someone/run"].commits) == 3


def test_weights_in_another_number_of_files_replace_those_of_before(
    hub: Hub, token: str, tmp_path: Path
) -> None:
    """`from_pretrained` would read the old single file, not the new ones."""
    running, single = Uploads(client(token)), {"model.safetensors", "config.json"}
    parts = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    split = {*parts, "model.safetensors.index.json", "config.json"}
    for number, names in enumerate((single, split, single)):
        files = StagedFiles(tmp_path)
        for name in names:
            (files.path / name).write_text(str(number))
        running.add(Upload("the model", "m", files))
        assert running.finish(60, print) == []
        assert set(hub.files("someone/run")) == names


def test_a_file_that_the_repository_ignores_is_an_error(hub: Hub, token: str, tmp_path: Path) -> None:
    running, one = Uploads(client(token)), upload(tmp_path)
    repository = hub.repositories["someone/run"]
    ignore = {"key": "file", "value": {"path": ".gitignore", "content": "YS5qc29u"}}
    hub.commit(repository, "main", [{"key": "header", "value": {"summary": ""}}, ignore])
    running.add(one)
    assert running.finish(60, print) == [one]
    assert "left out a.json" in one.error
