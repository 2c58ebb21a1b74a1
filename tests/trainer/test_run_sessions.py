"""What the report says of a run that failed, was preempted or killed, and was resumed: all of its sessions, once."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.test_malicious import reseal
from tests.dist.launch import end_of
from tests.trainer.small import Net, arguments, rows

from windlass import ReportCallback, Trainer, TrainerCallback
from windlass.callbacks.run_record import RECORD, read_record
from windlass.checkpoint.store import Store
from windlass.cli.main import main
from windlass.core.errors import EXIT_PREEMPTED

STEPS, BATCH, EVERY = 12, 4, 4


class Ends(TrainerCallback):
    """Ends the process, or the run, after an update."""

    def __init__(self, how: str, step: int) -> None:
        self.how, self.step = how, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step:
            return
        if self.how == "fails":
            raise RuntimeError("the seventh update")
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "preempted": signal.SIGTERM}[self.how])


def train(folder: Path, how: str = "", step: int = 0, **changes: Any) -> None:
    args = arguments(
        folder, max_steps=STEPS, logging_steps=1, save_strategy="steps", save_steps=EVERY, report_to="report",
        per_device_train_batch_size=BATCH, resume_from_checkpoint="auto", save_in_background=False, **changes,
    )  # fmt: skip
    Trainer(Net(), args, train_dataset=rows(64), callbacks=[Ends(how, step)]).train()


def found(folder: Path) -> dict[str, Any]:
    record = read_record(folder)
    assert record is not None
    return record


def page(folder: Path) -> str:
    return (folder / "report.html").read_text()


def untimed(page: str) -> str:
    """A page without what depends on when it is made: the facts of `windlass status`, goodput, ends of attempts."""
    page = re.sub(r'<dl class="facts">.*?</dl>\n', "", page, flags=re.DOTALL)
    without = re.sub(r"<h2>Goodput .*?</div></div>", "", page, flags=re.DOTALL)
    return re.sub(r'"t1":[\d.]+', "", without)


def test_a_run_that_failed_and_was_resumed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="seventh"):
        train(tmp_path, "fails", 7)
    failed = found(tmp_path)
    assert (failed["end"]["status"], failed["end"]["step"]) == ("failed", 7)
    assert failed["end"]["trained"]["samples"] == 7 * BATCH
    assert f"failed at step 7 of {STEPS} at 20" in page(tmp_path)
    assert "RuntimeError: the seventh update" in page(tmp_path)
    saved = Store(tmp_path).list()[-1].meta["trained"]
    assert 0 < saved["seconds"] < failed["end"]["trained"]["seconds"]

    train(tmp_path)
    record = found(tmp_path)
    assert [session["from_step"] for session in record["sessions"]] == [0, EVERY]
    assert [session["repeated"] for session in record["sessions"]] == [0, 3]
    assert record["trained"] == saved
    assert record["end"]["trained"]["samples"] == STEPS * BATCH
    assert record["end"]["trained"]["seconds"] > saved["seconds"]
    assert record["arguments"].keys() >= {"output_dir", "save_steps", "report_to"}
    assert not record["arguments"].keys() & {"debug", "gradient_checkpointing", "accelerator_config"}
    for text in (f"finished after {STEPS} steps at 20", "in 2 sessions", "3 updates repeated"):
        assert text in page(tmp_path)


def test_a_complete_run_that_is_resumed_keeps_its_report(tmp_path: Path) -> None:
    train(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("report.html", RECORD)}
    train(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert main(["report", str(tmp_path)]) == 0  # whose summary has the time of the second call
    # The record has since got the time that the first report took.
    assert untimed(page(tmp_path)) == untimed(before["report.html"].decode())


@pytest.mark.parametrize("saved", [None, {"from_step": 0}, {"from_step": 0, "seconds": "1", "samples": 4.0}])
def test_a_checkpoint_without_counts_is_counted_from_its_step(tmp_path: Path, saved: Any) -> None:
    with pytest.raises(RuntimeError):
        train(tmp_path, "fails", 7)
    reseal(tmp_path / f"checkpoint-{EVERY}", lambda body: body["meta"].update(trained=saved))
    train(tmp_path)
    record = found(tmp_path)
    assert record["end"]["trained"]["from_step"] == EVERY
    assert record["end"]["trained"]["samples"] == (STEPS - EVERY) * BATCH
    assert f"since step {EVERY}" in page(tmp_path)


def test_a_run_that_was_preempted_and_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    code, said = end_of(Path(__file__), run, "preempted", 5)
    assert code == EXIT_PREEMPTED, said
    assert f"preempted at step 5 of {STEPS} at 20" in page(run)
    code, said = end_of(Path(__file__), run, "killed", 10)
    assert code == -signal.SIGKILL, said
    assert f"running, step 8 of {STEPS}; last row at 20" in page(run)  # of the save
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(run / "report.html")
    assert f"killed after step 9 of {STEPS}; last row at 20" in page(run)
    assert "updates per second, in 2 sessions" in page(run)
    code, said = end_of(Path(__file__), run, "", 0)
    assert code == 0, said
    assert [session["repeated"] for session in found(run)["sessions"]] == [0, 0, 1]
    assert found(run)["end"]["trained"]["samples"] == STEPS * BATCH


def test_the_callback_is_given_as_a_class_and_its_folder_may_be_another(tmp_path: Path) -> None:
    data = rows(16)
    args = arguments(tmp_path / "run", max_steps=2)
    Trainer(Net(), args, train_dataset=data, callbacks=[ReportCallback]).train()
    assert "finished after 2 steps" in page(tmp_path / "run")
    shown = ReportCallback(tmp_path / "shown")
    Trainer(Net(), arguments(tmp_path / "run", max_steps=3), train_dataset=data, callbacks=[shown]).train()
    assert "finished after 3 steps" in page(tmp_path / "shown")
    assert "finished after 2 steps" in page(tmp_path / "run")


def test_every_run_has_a_record(tmp_path: Path) -> None:
    class Told(Trainer):
        def data_facts(self) -> dict[str, Any]:
            return {"rows": 16}

    Told(Net(), arguments(tmp_path, max_steps=2), train_dataset=rows(16)).train()
    assert found(tmp_path)["data"] == {"rows": 16}
    assert not (tmp_path / "report.html").exists()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
