"""`windlass checkpoint push`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hub.server import Hub
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.cli.checkpoint import checkpoint_command


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


def test_one_checkpoint_without_what_resuming_needs(hub: Hub, run: Path) -> None:
    assert checkpoint_command(["push", str(run / "checkpoint-1"), "mine", "--model-only"]) == 0
    assert set(hub.files("someone/mine")) == {"model.safetensors"}


def test_a_folder_with_a_model(hub: Hub, run: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (run / "checkpoint-1/model.safetensors").rename(tmp_path / "model/model.safetensors")
    assert checkpoint_command(["push", str(tmp_path / "model"), "mine"]) == 0
    assert set(hub.files("someone/mine")) == {"model.safetensors"}
