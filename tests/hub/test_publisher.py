"""What each strategy publishes, and which error names which setting."""

from __future__ import annotations

import shlex
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from tests.hub.server import READER, TOKEN, Fault, Hub
from tests.said import listening
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import MANIFEST_NAME, manifest_bytes, read_manifest
from windlass.checkpoint.stored import open_folder, open_weights
from windlass.cli.checkpoint import checkpoint_command
from windlass.core.errors import ConfigError
from windlass.hub.publisher import HubSettings, Publisher


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    args = arguments(folder, max_steps=2, save_strategy="steps", save_steps=1)
    Trainer(Net(), args, train_dataset=rows(16)).train()
    return folder


@pytest.fixture
def publish(hub: Hub, token: str, run: Path, tmp_path: Path) -> Any:
    def publish(strategy: str, *checkpoints: str, **settings: Any) -> dict[str, bytes]:
        publisher = Publisher(HubSettings("run", token, strategy=strategy, **settings), tmp_path)
        for name in checkpoints:
            shutil.copytree(run / name, tmp_path / name)
            publisher.saved(tmp_path / name)
            shutil.rmtree(tmp_path / name)  # as retention may do at any moment
        assert publisher.finish()
        return hub.files("someone/run", settings.get("revision") or "main") if hub.repositories else {}

    return publish


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_the_model_of_each_save(publish: Any, run: Path) -> None:
    assert publish("every_save", "checkpoint-1") == {
        "model.safetensors": (run / "checkpoint-1/model.safetensors").read_bytes()
    }


def test_the_last_checkpoint_is_whole(publish: Any, run: Path, hub: Hub) -> None:
    found = publish("checkpoint", "checkpoint-1", "checkpoint-2", always=True, revision="mine")
    expected = {f"last-checkpoint/{name}": data for name, data in content(run / "checkpoint-2").items()}
    assert found == {**expected, "model.safetensors": expected["last-checkpoint/model.safetensors"]}
    assert hub.files("someone/run") == {}
    trees = [set(tree) for _, tree in hub.repositories["someone/run"].commits[1:]]
    assert trees == [set(found)] * 2, "one commit for each save, with all of its files"


def test_all_checkpoints(publish: Any) -> None:
    found = publish("all_checkpoints", "checkpoint-1", "checkpoint-2")
    assert {name.split("/")[0] for name in found} == {"checkpoint-1", "checkpoint-2", "model.safetensors"}


def test_nothing_before_the_end(publish: Any, hub: Hub) -> None:
    assert publish("end", "checkpoint-1") == {}
    assert hub.requests == []


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_a_checkpoint_on_several_disks_is_not_uploaded_in_part(
    strategy: str, hub: Hub, token: str, run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-1"
    shutil.copytree(run / folder.name, folder)
    info = read_manifest(folder, Files())
    manifest = manifest_bytes(info.step, 2, info.files, {}, info.serial, node=0, nodes=2)
    (folder / MANIFEST_NAME).write_bytes(manifest)
    publisher = Publisher(HubSettings("run", token, strategy=strategy), tmp_path)
    with listening() as said:
        publisher.saved(folder)
        assert publisher.finish()
    assert any("several disks are not uploaded during the run" in line for line in said)
    assert hub.files("someone/run") == {}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (HubSettings("run", "hf_nobodynobodynobody"), "hub_token"),
        (HubSettings("someone/run", READER), "hub_token"),
        (HubSettings("run"), "hub_token"),
        (HubSettings("run", "“hf_nobodynobodynobody”"), "hub_token"),
        (HubSettings("a--b"), "hub_model_id"),
        (HubSettings("reserved", TOKEN), "hub_model_id"),
        (HubSettings("run", TOKEN, revision="not a branch"), "hub_revision"),
    ],
)
def test_an_error_names_its_setting(
    hub: Hub, tmp_path: Path, settings: HubSettings, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens: of no user, for reading only, none at all; names that the client or the Hub refuses."""
    hub.create("someone/run")
    hub.faults = [Fault("POST .*/branch/", status=400)]
    if settings.repository == "reserved":
        hub.faults = [Fault("POST /api/repos/create", status=400)]
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no login"))
    with pytest.raises(ConfigError) as error:
        Publisher(settings, tmp_path).open()
    assert [problem.field for problem in error.value.problems] == [field]
    assert settings.token is None or settings.token not in str(error.value)


@pytest.mark.parametrize("offline", [False, True])
def test_no_network_is_one_error_with_both_ways_out(
    hub: Hub, token: str, tmp_path: Path, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    with pytest.raises(ConfigError, match=r"push_to_hub=False.*windlass checkpoint push") as error:
        Publisher(HubSettings("run", token), tmp_path).open()
    assert [problem.field for problem in error.value.problems] == ["push_to_hub"]


@pytest.mark.parametrize("status", [500, 429])
def test_a_hub_in_trouble_is_not_the_fault_of_a_setting(
    hub: Hub, token: str, tmp_path: Path, status: int
) -> None:
    hub.faults = [
        Fault("/auth-check", status=status, times=99),
        Fault("POST /api/repos/create", status=status, times=99),
    ]
    with pytest.raises(ConfigError, match=f"{status}.*push_to_hub=False.*windlass checkpoint push") as error:
        Publisher(HubSettings("run", token), tmp_path).open()
    assert [problem.field for problem in error.value.problems] == ["push_to_hub"]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"strategy": "every_save"}, "--model-only"),
        ({"strategy": "checkpoint"}, ""),
        ({"strategy": "checkpoint", "revision": "my branch"}, "--revision 'my branch'"),
        ({"strategy": "all_checkpoints"}, "--own-folder"),
    ],
)
def test_what_was_not_uploaded_is_listed_with_a_command_that_does_the_same(
    hub: Hub, token: str, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], options: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", token)
    checkpoint = tmp_path / "two words" / "checkpoint-1"
    shutil.copytree(run / "checkpoint-1", checkpoint)
    branch = settings.get("revision", "main")
    found = []
    for faults in ([], [Fault("POST .*/commit/", status=403)]):
        hub.reset()
        publisher = Publisher(HubSettings("run", token, **settings), tmp_path)
        publisher.open()
        hub.faults = faults
        publisher.saved(checkpoint)
        assert publisher.finish() is not bool(faults)
        found.append(hub.files("someone/run", branch))
    assert list((tmp_path / ".windlass-hub").iterdir()) == []
    (command,) = {line.partition("; later: ")[2] for line in caplog.text.splitlines() if "; later: " in line}
    what = "the model of checkpoint-1" if options == "--model-only" else "checkpoint-1"
    assert f"\n  {what} (" in caplog.text
    assert command == f"windlass checkpoint push '{checkpoint}' someone/run {options}".strip()
    assert checkpoint_command(shlex.split(command)[2:]) == 0
    again = hub.files("someone/run", branch)
    assert again.pop("README.md").startswith(b"---")
    assert (again, found[1]) == (found[0], {})


def test_a_checkpoint_that_was_taken_away_costs_its_upload_alone(
    hub: Hub, token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(HubSettings("run", token), tmp_path)
    publisher.saved(tmp_path / "checkpoint-1")
    assert not publisher.finish()
    assert "the model of checkpoint-1 was not uploaded, and training continues" in caplog.text


def test_another_publisher_of_the_same_folder_leaves_uploads_under_way_alone(
    hub: Hub, token: str, run: Path, tmp_path: Path
) -> None:
    """`windlass checkpoint push` beside a run, or `push_to_hub(revision=...)` of the same script."""
    first, second = (Publisher(HubSettings(name, token), tmp_path) for name in ("run", "other"))
    first.open()
    go_on = threading.Event()
    hub.faults = [Fault("someone/run/preupload/", hold=go_on)]
    first.saved(run / "checkpoint-1")
    second.saved(run / "checkpoint-2")
    assert second.finish()
    go_on.set()
    assert first.finish()
    name = "model.safetensors"
    assert hub.files("someone/run")[name] == (run / "checkpoint-1" / name).read_bytes()
    assert hub.files("someone/other")[name] == (run / "checkpoint-2" / name).read_bytes()


def test_the_weights_of_a_sharded_checkpoint_are_joined_for_the_root(
    hub: Hub, token: str, root: Path, tmp_path: Path
) -> None:
    sharded = root / "tests/reliability/written_before/sharded/checkpoint-3"
    publisher = Publisher(HubSettings("run", token), tmp_path)
    publisher.saved(sharded)
    assert publisher.finish()
    found = hub.files("someone/run")
    assert "model.safetensors" in found
    assert not any("rank-" in name for name in found)
    with open_weights(open_folder(sharded)) as tensors:
        whole = load(found["model.safetensors"])
        assert whole.keys() == set(tensors.names)
        assert all(torch.equal(whole[name], tensors.read(name)) for name in tensors.names)
