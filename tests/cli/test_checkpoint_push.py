"""`windlass checkpoint push`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.hub.server import READER, Hub
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.cli.checkpoint import checkpoint_command
from windlass.core.errors import CheckpointError
from windlass.hub.uploads import Upload, Uploads


@pytest.fixture
def run(tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_TOKEN", token)
    args = arguments(tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=1)
    trainer = Trainer(Net(), args, train_dataset=rows(16))
    trainer.train()
    return tmp_path / "run"


def test_the_newest_checkpoint_of_a_run(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint_command(["push", str(run), "mine", "--private"]) == 0
    assert "checkpoint-2 is published in someone/mine" in capsys.readouterr().out
    found = hub.files("someone/mine")
    assert found["last-checkpoint/manifest.json"] == (run / "checkpoint-2/manifest.json").read_bytes()
    assert hub.repositories["someone/mine"].private
    (run / "card").mkdir()
    (run / "card/README.md").write_bytes(found["README.md"])
    card = pytest.importorskip("huggingface_hub").ModelCard.load(run / "card/README.md")
    assert "2 updates" in card.text
    assert "| learning_rate | 0.05 |" in card.text
    assert "## Versions" not in card.text, "those of this process are not those of the run"
    edited = {"path": "README.md", "content": "bWluZQ=="}
    changes = [{"key": "header", "value": {"summary": ""}}, {"key": "file", "value": edited}]
    hub.commit(hub.repositories["someone/mine"], "main", changes)
    assert checkpoint_command(["push", str(run), "mine"]) == 0
    assert hub.files("someone/mine")["README.md"] == b"mine", "a card that a user edited stays"


def test_a_push_has_no_limit_of_time_and_ctrl_c_ends_it(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert checkpoint_command(["push", str(run), "mine"]) == 0
    assert "at most" not in caplog.text
    limits, left = list[float](), list[Uploads]()

    def interrupted(uploads: Uploads, limit: float, report: Callable[[str], None]) -> list[Upload]:
        limits.append(limit)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Uploads, "finish", interrupted)
        patched.setattr(Uploads, "leave", lambda uploads: left.append(uploads))
        with pytest.raises(KeyboardInterrupt):
            checkpoint_command(["push", str(run), "mine"])
    assert limits == [math.inf]
    assert len(left) == 1, "the end of the process would wait for the upload again"


def test_one_checkpoint_without_what_resuming_needs(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint_command(["push", str(run / "checkpoint-1"), "mine", "--model-only", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"published": str(run / "checkpoint-1"), "repository": "someone/mine"}
    assert set(hub.files("someone/mine")) == {"model.safetensors", "README.md"}


def test_a_folder_with_a_model(hub: Hub, run: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (run / "checkpoint-1/model.safetensors").rename(tmp_path / "model/model.safetensors")
    assert checkpoint_command(["push", str(tmp_path / "model"), "mine"]) == 0
    assert set(hub.files("someone/mine")) == {"model.safetensors"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other/pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="other holds no model in safetensors files: export it first"):
        checkpoint_command(["push", str(tmp_path / "other"), "another"])
    assert "someone/another" not in hub.repositories


def test_the_final_model_of_a_run_is_not_that_of_its_newest_checkpoint(
    hub: Hub, run: Path, tmp_path: Path
) -> None:
    """As after `load_best_model_at_end`: what `push_to_hub()` could not upload."""
    best = (run / "checkpoint-1/model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(best)
    assert checkpoint_command(["push", str(run), "mine", "--model-only"]) == 0
    assert hub.files("someone/mine")["model.safetensors"] == best


def test_what_the_hub_refuses_is_told_without_arguments_of_a_run(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=r"^cannot open .*a--b"):
        checkpoint_command(["push", str(run), "a--b"])
    hub.create("someone/mine")
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(CheckpointError, match=r"do not have write access; log in with"):
        checkpoint_command(["push", str(run), "someone/mine"])
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"refused$"):
        checkpoint_command(["push", str(run), "mine"])
