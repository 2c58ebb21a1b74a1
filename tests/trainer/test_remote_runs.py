"""Runs whose output folder is a URL."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.resume_cases import Case, bits, in_a_child, kill, rows, run

from windlass.checkpoint.remote import RemoteFolder
from windlass.core.errors import CheckpointError, ConfigError
from windlass.core.locations import local_folder

CASE = Case({"save_total_limit": 2, "num_train_epochs": 1})


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("WINDLASS_STAGING", str(tmp_path / "staging"))
    return f"file://{tmp_path}/bucket/run"


def fresh_machine(url: str) -> None:
    shutil.rmtree(local_folder(url))


def train(url: str, *callbacks: Any, **how: Any) -> Any:
    # The folder of `run` becomes `output_dir`: a path would lose one of the URL's slashes.
    return run(url, CASE, *callbacks, **how)  # type: ignore[arg-type]


def uploaded(url: str) -> list[str]:
    return [name for name in RemoteFolder(url).names() if name.startswith("checkpoint-")]


def test_continues_on_a_fresh_machine(url: str, tmp_path: Path) -> None:
    clean = run(tmp_path / "clean", CASE)
    assert in_a_child(lambda: train(url, kill("on_step_end", 4))) < 0
    assert uploaded(url)
    fresh_machine(url)
    trainer = train(url, resume=True)
    assert bits(trainer) == bits(clean)
    assert rows(local_folder(url)) == rows(tmp_path / "clean")
    assert uploaded(url) == ["checkpoint-4", "checkpoint-5"], "removed by the same rule there"
    arrived = [json.loads(line) for line in RemoteFolder(url).read("metrics.jsonl", 1 << 20).splitlines()]
    assert arrived[-1]["step"] == 5
    trainer.save_model()
    assert "model.safetensors" in RemoteFolder(url).names()


def test_a_checkpoint_by_its_url(url: str) -> None:
    train(url)
    fresh_machine(url)
    assert train(url, resume=f"{url}/checkpoint-4").state.global_step == 5
    with pytest.raises(CheckpointError, match="checkpoint-3"):
        train(url, resume=f"{url}/checkpoint-3")
    with pytest.raises(CheckpointError, match="its last part is not checkpoint-N"):
        train(url, resume=url)


def test_best_is_fetched(url: str) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    state = train(url, max_steps=3, **best).state
    assert state.best_model_checkpoint is not None
    fresh_machine(url)
    again = train(url, resume=True, max_steps=4, **best)
    assert Path(str(again.state.best_model_checkpoint)).is_dir()


def test_save_that_does_not_arrive_costs_that_save(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def before(self: RemoteFolder, operation: str, name: str) -> None:
        if operation == "upload" and name.startswith("checkpoint-4/"):
            raise ConnectionError("no route to host")

    monkeypatch.setattr(RemoteFolder, "before", before)
    assert train(url).state.global_step == 5
    assert uploaded(url) == ["checkpoint-3", "checkpoint-5"]
    assert "CHECKPOINT 4 WAS NOT SAVED" in caplog.text
    assert "no route to host" in caplog.text


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("dropbox://folder/run", "pip install dropboxdrivefs"),
        ("nonsense://bucket/run", "no such kind of folder is known as nonsense://"),
    ],
)
def test_what_cannot_be_opened_is_refused_first(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        train(address)
    assert str(refused.value).count("output_dir") == 1


def test_what_cannot_be_written_is_refused_before_training(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(self: RemoteFolder, operation: str, name: str) -> None:
        raise PermissionError("access denied")

    monkeypatch.setattr(RemoteFolder, "before", before)
    with pytest.raises(ConfigError, match=r"output_dir=.*access denied"):
        train(url)
