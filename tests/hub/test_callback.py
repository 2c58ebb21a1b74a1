"""Runs that publish what they save, and are continued from there."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch
from tests.hub.server import Fault, Hub
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.core.errors import EXIT_PREEMPTED, ConfigError, Preempted


def trainer(folder: Path, token: str, steps: int = 4, **changes: object) -> Trainer:
    settings = {"push_to_hub": True, "hub_token": token, "hub_model_id": "run", "save_strategy": "steps",
                "save_steps": 2, "lr_scheduler_type": "constant", **changes}  # fmt: skip
    return Trainer(Net(), arguments(folder, max_steps=steps, **settings), train_dataset=rows(64))


def test_a_run_is_continued_from_the_hub_to_the_same_bits(hub: Hub, token: str, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", token, 6, push_to_hub=False)
    whole.train()
    trainer(tmp_path / "first", token, hub_strategy="checkpoint").train()
    assert hub.repositories["someone/run"].messages[-1] == "Training in progress, step 4"
    second = trainer(tmp_path / "second", token, 6, hub_strategy="checkpoint")
    second.train(resume_from_checkpoint="hub:someone/run")
    assert second.state.global_step == 6
    assert torch.equal(second.model.layer.weight, whole.model.layer.weight)
    assert hub.repositories["someone/run"].messages[-1] == "Training in progress, step 6"


def test_an_unreachable_hub_is_one_error_before_training(hub: Hub, token: str, tmp_path: Path) -> None:
    hub.faults = [Fault("POST /api/repos/create", status=403, times=9)]
    refused = trainer(tmp_path, token)
    with pytest.raises(ConfigError, match="hub_token"):
        refused.train()
    assert refused.state.global_step == 0


def test_a_hub_that_fails_costs_the_upload_and_not_the_run(
    hub: Hub, token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.faults = [Fault("POST .*/commit/", status=403, times=99)]
    run = trainer(tmp_path, token)
    run.train()
    assert run.state.global_step == 4
    assert "not uploaded to someone/run" in caplog.text
    assert token not in caplog.text
    assert not any(
        token in path.read_text("utf-8", "ignore") for path in tmp_path.rglob("*") if path.is_file()
    )


@pytest.mark.dist
def test_only_the_main_process_publishes(hub: Hub, token: str, root: Path, tmp_path: Path) -> None:
    """The second time it cannot write the card, which all processes learn."""
    said = launch(2, root / "tests/hub/published_ranks.py", tmp_path / "run", token, hub.url)
    assert sum("repos/create" in request for request in hub.requests) == 1
    assert hub.repositories["someone/run"].messages[-1] == "End of training"
    assert "last-checkpoint/rank-00001.safetensors" in hub.files("someone/run")
    assert "failed: OSError: [Errno 22] it is not a plain file" in said
    assert "failed: CheckpointError: rank 0: OSError: [Errno 22] it is not a plain file" in said


@pytest.mark.dist
def test_every_rank_ends_with_the_error_of_the_main_process(
    hub: Hub, token: str, root: Path, tmp_path: Path
) -> None:
    hub.faults = [Fault("POST /api/repos/create", status=403, times=9)]
    said = launch(2, root / "tests/hub/published_ranks.py", tmp_path / "run", token, hub.url)
    assert said.count("refused: hub_token='***': cannot open") == 2
    assert said.count("Give a token that may write there at step 0") == 2
    assert "Traceback" not in said


@pytest.mark.dist
def test_no_rank_waits_for_a_main_process_without_the_package(root: Path, tmp_path: Path, token: str) -> None:
    said = launch(2, root / "tests/hub/published_ranks.py", tmp_path / "run", token, "", 20)
    assert "refused: huggingface_hub is needed to publish on the Hub" in said
    assert "refused: push_to_hub=True: the main process cannot publish: huggingface_hub is needed" in said


@pytest.mark.dist
def test_ranks_do_not_wait_too_long_for_the_uploads_of_the_first_one(
    hub: Hub, token: str, root: Path, tmp_path: Path
) -> None:
    hub.faults = [Fault("POST .*/commit/", stall=60, times=9)]
    said = launch(2, root / "tests/hub/published_ranks.py", tmp_path / "run", token, hub.url, 8)
    assert "upload(s) to the Hub, at most 4 s: checkpoint-" in said
    assert "checkpoint-4 (it did not end within 4 s)" in said


def test_a_save_that_cannot_be_staged_costs_the_upload_and_not_the_run(
    hub: Hub, token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path, token, hub_strategy="checkpoint")
    run.init_hf_repo()
    (tmp_path / ".windlass-hub").write_text("a file, so no folder can be made there")
    run.train()
    assert run.state.global_step == 4
    assert "was not uploaded, and training continues" in caplog.text
    assert f"later: windlass checkpoint push {tmp_path}/checkpoint-4 someone/run" in caplog.text


KILLED = """
import sys
from pathlib import Path
from tests.hub.test_callback import trainer
trainer(Path(sys.argv[1]), sys.argv[2], 40, hub_strategy="checkpoint", hub_always_push=True).train()
"""


def test_a_run_that_is_killed_in_an_upload_is_continued_from_the_hub(
    hub: Hub, token: str, tmp_path: Path, root: Path
) -> None:
    """The upload of a later checkpoint never ends; the one before it is whole on the Hub."""
    with _started(KILLED, hub, root, str(tmp_path / "killed"), token) as process:
        try:
            _wait(lambda: len(hub.repositories.get("someone/run", _NONE).commits) > 2)
            hub.faults = [Fault("PUT /lfs/", stall=30.0, times=99)]
            begun = len(hub.requests)
            _wait(lambda: any("PUT /lfs/" in request for request in hub.requests[begun:]))
        finally:
            process.send_signal(signal.SIGKILL)
    hub.faults = []
    again = trainer(tmp_path / "again", token, 42, push_to_hub=False)
    again.train(resume_from_checkpoint="hub:someone/run")
    whole = trainer(tmp_path / "whole", token, 42, push_to_hub=False)
    whole.train()
    assert torch.equal(again.model.layer.weight, whole.model.layer.weight)


def test_a_checkpoint_that_did_not_arrive_is_uploaded_by_the_run_that_continues(
    hub: Hub, token: str, tmp_path: Path
) -> None:
    """Also where nothing is left to train; one that arrived is not uploaded again."""
    hub.faults = [Fault("POST .*/commit/", status=403, times=99)]
    trainer(tmp_path, token, hub_strategy="checkpoint").train()
    hub.faults = []
    for _ in range(2):
        trainer(tmp_path, token, hub_strategy="checkpoint").train(resume_from_checkpoint=True)
        messages = hub.repositories["someone/run"].messages
        assert messages == ["initial commit", "Training in progress, step 4"]


def test_all_checkpoints_that_did_not_arrive_are_uploaded_by_the_run_that_continues(
    hub: Hub, token: str, tmp_path: Path
) -> None:
    """The newest arrived, and is uploaded last once more: the model in the root of the repository is its own. One that
    an interrupted save left under another name is left alone.
    """
    hub.faults = [Fault("POST .*/commit/", status=403)]
    trainer(tmp_path, token, hub_strategy="all_checkpoints").train()
    for name in ("checkpoint-2", "replaced-checkpoint-2"):
        assert (tmp_path / name).is_dir()
        trainer(tmp_path, token, hub_strategy="all_checkpoints").train(resume_from_checkpoint=True)
        messages = hub.repositories["someone/run"].messages
        assert messages[1:] == [f"Training in progress, step {step}" for step in (4, 2, 4)]
        (tmp_path / name).rename(tmp_path / "replaced-checkpoint-2")
    found = hub.files("someone/run")
    assert "checkpoint-2/model.safetensors" in found
    assert found["model.safetensors"] == found["checkpoint-4/model.safetensors"]


class _SignalsWhenWaiting(logging.Handler):
    """Sends this process a signal once the run waits for its uploads."""

    def emit(self, record: logging.LogRecord) -> None:
        if "upload(s) to the Hub" in record.getMessage():
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_last_wait_ends_with_a_signal(
    hub: Hub, token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.faults = [Fault("PUT /lfs/", stall=5.0)]
    run, signals = trainer(tmp_path / "run", token, 2), _SignalsWhenWaiting()
    log = logging.getLogger("windlass")
    log.addHandler(signals)
    try:
        with pytest.raises(Preempted):
            run.train()
    finally:
        log.removeHandler(signals)
    assert "the process had to exit" in caplog.text
    assert f"windlass checkpoint push {tmp_path}/run/checkpoint-2 someone/run" in caplog.text


ENDED = """
import sys
from pathlib import Path
from tests.hub.test_callback import trainer
trainer(Path(sys.argv[1]), sys.argv[2], 4, hub_strategy="checkpoint", preemption_deadline=None).train()
"""


@pytest.mark.slow
def test_a_process_ends_although_the_hub_does_not_answer(
    hub: Hub, token: str, tmp_path: Path, root: Path
) -> None:
    """No thread keeps the process, although several files are under way."""
    hub.faults = [Fault("PUT /lfs/", stall=300.0, times=99)]
    with _started(ENDED, hub, root, str(tmp_path / "run"), token) as process:
        lines = _Lines(process)
        try:
            lines.wait_for("upload(s) to the Hub, at most")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == EXIT_PREEMPTED  # a hundred times what it takes, a fifth of the stall
            said = lines.rest()
        finally:
            process.kill()
    assert "not uploaded to someone/run" in said
    assert f"windlass checkpoint push {tmp_path}/run/checkpoint-4 someone/run" in said
    assert token not in said


SAVED = """
import sys
from pathlib import Path
from tests.hub.test_callback import trainer
run = trainer(Path(sys.argv[1]), sys.argv[2], 2, hub_strategy="end", save_strategy="no")
run.train()
run.save_model()
"""


@pytest.mark.slow
def test_the_process_waits_for_what_a_script_saves_last(
    hub: Hub, token: str, tmp_path: Path, root: Path
) -> None:
    hub.faults = [Fault("PUT /lfs/", stall=1.0)]
    with _started(SAVED, hub, root, str(tmp_path / "run"), token) as process:
        _, said = process.communicate()
    assert process.returncode == 0, said
    assert set(hub.files("someone/run")) == {"model.safetensors"}


class _Lines:
    """What a process says, read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._stream, self._heard = process.stderr, list[str]()

    def wait_for(self, text: str) -> None:
        assert self._stream is not None
        for line in self._stream:
            self._heard.append(line)
            if text in line:
                return
        raise AssertionError("".join(self._heard))

    def rest(self) -> str:
        assert self._stream is not None
        return "".join([*self._heard, self._stream.read()])


def _started(code: str, hub: Hub, root: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(root),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=environment, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip


class _NONE:
    commits: tuple[()] = ()


def _wait(condition: object) -> None:
    until = time.monotonic() + 120
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)
