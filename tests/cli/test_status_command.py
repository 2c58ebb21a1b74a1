from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.callbacks.clock_file import CLOCK
from windlass.callbacks.run_view import read_run
from windlass.cli.main import main
from windlass.cli.report_command import described
from windlass.cli.run_status import SCHEMA_FILE, status_of_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    options = {"max_steps": 6, "logging_steps": 2, "save_strategy": "steps", "save_steps": 3}
    Trainer(Net(), arguments(folder, **options), train_dataset=rows(64)).train()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def status(run: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["status", str(run), "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(found, json.loads(SCHEMA_FILE.read_text()))
    assert set(found) == set(json.loads(SCHEMA_FILE.read_text())["properties"]), "the schema lists every name"
    return found


def kill(run: Path, kind: str = "compute") -> None:
    """Make of a complete run one that was killed after step 5."""
    record = json.loads((run / "run.json").read_text())
    (session,) = record["sessions"]
    seconds = session.pop("seconds")
    del session["step"], session["status"]
    record["end"] = None
    (run / "run.json").write_text(json.dumps(record))
    shutil.rmtree(run / "checkpoint-6")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]
    (run / "metrics.jsonl").write_text("".join(lines) + '{"event": "log", "st')
    clock = {
        "began": session["began"],
        "elapsed": sum(seconds.values()),
        "kind": kind,
        "step": 5,
        "seconds": seconds,
    }
    (run / CLOCK).write_text(json.dumps(clock))


def test_a_complete_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = status(run, capsys, "--verify")
    assert (found["state"], found["sureness"], found["step"], found["progress"]) == (
        "finished",
        "certain",
        6,
        1.0,
    )
    assert (found["checkpoint"]["step"], found["checkpoint"]["verified"]) == (6, "bytes")
    assert found["at_risk"] is None
    assert found["goodput"]["wall_seconds"] == pytest.approx(
        sum(found["goodput"]["seconds"].values()), abs=0.02
    )
    assert main(["status", str(run)]) == 0
    assert "run: finished after 6 steps" in capsys.readouterr().out


def test_the_memory_of_a_planned_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the last attempt which has it; what is damaged counts as unknown."""
    record = json.loads((run / "run.json").read_text())
    (session,) = record["sessions"]
    found = {"predicted": 3 * 2**30, "measured": 4 * 2**30}
    shown = "4 GiB at the peak of rank 0; the plan was 3 GiB (-25.0%)"
    for memory in (
        None,
        {"predicted": 1},
        {"predicted": True, "measured": 0},
        {**found, "predicted": 10**400},
        found,
    ):
        record["sessions"] = [{**session, "memory": memory}, session]
        (run / "run.json").write_text(json.dumps(record))
        known = memory is found
        assert status(run, capsys)["memory"] == (found if known else None)
        assert main(["status", str(run)]) == 0
        assert (shown in capsys.readouterr().out) is known
        assert (("memory", shown) in described(read_run(run))) is known


@pytest.mark.parametrize("content", [None, "{"])
def test_without_a_record_it_is_not_known_how_a_run_ended(
    content: str | None, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "run.json").unlink() if content is None else (run / "run.json").write_text(content)
    assert status(run, capsys)["state"] == "unknown"
    assert main(["status", str(run)]) == 0
    assert (
        "run: ended after step 6, how is not known: run.json is missing or damaged" in capsys.readouterr().out
    )


def test_a_killed_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kill(run)
    found = status(run, capsys)
    assert (found["state"], found["step"]) == ("killed", 5)
    assert found["at_risk"]["updates"] == 2
    assert found["resume"]["command"]
    assert 'resume_from_checkpoint="auto"' in found["resume"]["needs"]
    assert found["notes"] == ["metrics.jsonl, line 3: an unfinished line; it is left out"]


@pytest.mark.parametrize(
    ("needs", "end"),
    [("nothing", "train.py --lr 1"), ("flag", "train.py --lr 1 --resume_from_checkpoint auto")],
)
def test_what_a_recorded_script_needs_to_resume(
    needs: str, end: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill(run)
    record = json.loads((run / "run.json").read_text())
    assert record["process"]["needs"] == "script", "its train() was called without an argument"
    record["process"] |= {"arguments": ["train.py", "--lr", "1"], "needs": needs}
    record["process"]["output"] = str(run)
    (run / "run.json").write_text(json.dumps(record))
    found = status(run, capsys)["resume"]
    assert found["command"].endswith(f"python {end}")
    assert found["needs"] == ""


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train", "a.yaml", "--output-dir", "run"], "train a.yaml --output-dir NOW --resume"),
        (["train", "--output-dir=run", "a.yaml", "--resume"], "train a.yaml --output-dir NOW --resume"),
        (["train", "training.output_dir=run"], "train --output-dir NOW --resume"),
    ],
)
def test_a_run_that_was_moved_is_resumed_where_it_is(
    words: list[str], command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill(run)
    record = json.loads((run / "run.json").read_text())
    record["process"] |= {"folder": str(run.parent), "arguments": ["windlass", *words]}
    record["arguments"]["output_dir"] = run.name
    record["process"]["output"] = str(run)
    if "a.yaml" not in words:  # as records of before
        del record["process"]["output"]
    (run / "run.json").write_text(json.dumps(record))
    assert "NOW" not in status(run, capsys)["resume"]["command"].replace(str(run), "NOW")
    moved = run.rename(run.with_name("moved"))
    found = status(moved, capsys)["resume"]
    command = command.replace("NOW", str(moved.resolve()))
    assert found["command"] == f"cd {run.parent} && windlass {command}"
    checkpoint = (moved / "checkpoint-3").rename(moved.with_name("elsewhere"))
    assert status(moved, capsys)["resume"]["command"].endswith(f"{command} auto"), "--resume would find none"
    checkpoint.rename(moved / "checkpoint-3")
    # Of a script, whose flags are its own; and of a machine that sees the folder of another.
    record["process"]["arguments"] = ["train.py"]
    (moved / "run.json").write_text(json.dumps(record))
    assert f"its output_dir is {moved.resolve()} now" in status(moved, capsys)["resume"]["needs"]
    record["process"]["folder"] = "/of/another/machine"
    (moved / "run.json").write_text(json.dumps(record))
    assert "output_dir" not in status(moved, capsys)["resume"]["needs"]


def test_a_damaged_checkpoint_is_not_the_one_to_resume_from(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (weights,) = (run / "checkpoint-6").glob("*model*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert status(run, capsys)["checkpoint"]["step"] == 6, "its files have their sizes"
    found = status(run, capsys, "--verify")
    assert (found["checkpoint"]["step"], found["checkpoint"]["verified"]) == (3, "bytes")
    assert "checkpoint-6" in found["damaged_checkpoints"][0]["path"]


def test_the_rank_that_failed_first_is_named(run: Path) -> None:
    kill(run)
    for rank, when in ((1, 20.0), (0, 21.0)):
        failure = {"rank": rank, "status": "failed", "step": 4, "time": when, "reason": f"ValueError: {rank}"}
        (run / f".windlass-failure-{rank}.json").write_text(json.dumps(failure))
    found = status_of_run(read_run(run))
    assert found["failure"] == {"rank": 1, "step": 4, "reason": "ValueError: 1"}
    assert found["sentence"] == "failed at step 4 on rank 1: ValueError: 1"


def test_a_live_run_and_a_copy_of_its_folder(run: Path) -> None:
    kill(run)
    code = "import sys, time; from pathlib import Path; from windlass.checkpoint.run_lock import RunLock\n"
    code += "lock = RunLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        live = status_of_run(read_run(run))
        assert (live["state"], live["sureness"]) == ("running", "certain")
        copied = Path(shutil.copytree(run, run.with_name("copy")))
        found = status_of_run(read_run(copied, now=time.time() + 3600))
        assert (found["state"], found["sureness"]) == ("killed", "likely"), "no process writes to the copy"
    finally:
        holder.communicate("")
    assert status_of_run(read_run(run))["state"] == "killed"


def test_ps_lists_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, run.parent / "more" / "other")
    assert main(["ps", str(run.parent), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["runs"]] == ["other", "run"]
    assert main(["ps", str(run.parent)]) == 0
    assert "more/other" in capsys.readouterr().out


def test_ps_follows_links_and_lists_each_run_once(
    run: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path_factory.mktemp("disk")
    shutil.copytree(run, disk / "runs" / "large")
    links = {"best": run, "up": run.parent.parent, "scratch": disk, "twice": disk}
    for name, target in links.items():
        (run.parent / name).symlink_to(target)
    (disk / "back").symlink_to(run.parent)
    (disk / "around").symlink_to(disk)
    assert main(["ps", str(run.parent)]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert names == ["run", "scratch/runs/large"]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that no process can read")
def test_ps_lists_runs_beside_one_that_cannot_be_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run.parent / "other").mkdir()
    (run.parent / "other" / "metrics.jsonl").symlink_to("/proc/self/mem")
    assert main(["ps", str(run.parent)]) == 1
    shown = capsys.readouterr()
    assert "finished" in shown.out
    assert "other cannot be read" in shown.err
    assert main(["ps", str(run.parent), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["runs"]] == ["run"]
    assert "other cannot be read" in found["unreadable"][0]


def test_ps_lists_runs_beside_a_folder_that_cannot_be_entered(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one that may be listed, and not entered, the names are known and nothing else."""
    with tempfile.TemporaryDirectory() as place:  # which another user may enter, as root may enter all
        os.chmod(place, 0o755)
        shutil.copytree(run, Path(place) / "run")
        (Path(place) / "other" / "inner").mkdir(parents=True)
        os.chmod(Path(place) / "other", 0o444)
        assert main(["ps", place]) == 0, "imports what the other user may not read"
        capsys.readouterr()
        user = os.getuid()
        os.setresuid(user or 65534, user or 65534, -1)  # the saved one stays, to which this process returns
        try:
            code = main(["ps", place])
        finally:
            os.setresuid(user, user, -1)
        os.chmod(Path(place) / "other", 0o755)
    shown = capsys.readouterr()
    assert code == 0
    assert "finished" in shown.out
    assert f"{place}/other cannot be searched: Permission denied" in shown.err


def test_what_is_not_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_the_reader_needs_no_torch() -> None:
    code = "import sys, windlass.cli.status_command, windlass.cli.ps_command; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
