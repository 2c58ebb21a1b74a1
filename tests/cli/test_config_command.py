"""`windlass config`: questions and the file that their answers make."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from windlass.cli.config_command import QUESTIONS, LinePrompter, Question, asked
from windlass.cli.main import main
from windlass.config.parallel.parallel_plan import plan_parallel
from windlass.core.errors import DataError
from windlass.core.world import World
from windlass.recipes.from_files import from_file


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path))
    return tmp_path


def answered(text: str) -> dict[str, object]:
    return {name: said.value for name, said in asked(LinePrompter(io.StringIO(text), io.StringIO())).items()}


def test_empty_answers_take_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    closed = {name: said.value for name, said in asked(LinePrompter(sink=io.StringIO())).items()}
    assert closed == answered("") == answered("\n" * 30) == {
        "strategy": "ddp", "launch.machines": 1, "cpu": False, "launch.processes": 2, "precision": "no",
    }  # fmt: skip


def test_the_file_is_written_also_if_nobody_reads_the_questions(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "windlass", "config", "--config_file", str(tmp_path / "launch.yaml")]
    done = subprocess.run(words, input=b"\n" * 30, stdout=writer, timeout=100, check=False)
    os.close(writer)
    assert done.returncode == 0
    assert from_file(tmp_path / "launch.yaml")["launch.machines"].value == 1


def test_answers_lead_to_further_questions() -> None:
    sharded = answered(
        "fsdp\n2\n1\n10.0.0.1\n29400\nc10d\nyes\n4\n2\ntransformer\nA,B\nyes\nsharded\nno\nyes\nbf16\n"
    )
    assert sharded == {
        "strategy": "fsdp", "launch.machines": 2, "launch.machine_rank": 1, "launch.main_address": "10.0.0.1",
        "launch.main_port": 29400, "launch.rendezvous": "c10d", "cpu": True, "launch.processes": 4,
        "fsdp.sharding": "hybrid_shard", "fsdp.wrap": "transformer", "fsdp.layers": ("A", "B"),
        "fsdp.cpu_offload": True, "fsdp.state": "sharded",
        "fsdp.activation_checkpointing": False, "fsdp.cpu_ram_efficient_loading": True,
        "precision": "bf16",
    }  # fmt: skip


def test_an_answer_that_cannot_be_is_asked_for_again() -> None:
    shown = io.StringIO()
    prompter = LinePrompter(io.StringIO("nonsense\n7\n\u00b2\n0\nno such number\n3\n"), shown)
    assert asked(prompter)["launch.machines"].value == 3
    assert shown.getvalue().count("must be one of ddp, fsdp, or a number from 0 to 1") == 3
    assert "whole number" in shown.getvalue()
    with pytest.raises(DataError, match="not UTF-8"):
        asked(LinePrompter(io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"), shown))


def test_the_file_is_read_back_as_it_was_answered(home: Path) -> None:
    command = [sys.executable, "-m", "windlass", "config"]
    answers = "fsdp\n1\nyes\n2\n\nsize\n1000\n\n\n\n\nbf16\n"
    done = subprocess.run(command, input=answers, capture_output=True, text=True, timeout=200, check=True)
    path = home / "default_config.yaml"
    assert str(path) in done.stdout
    settings = from_file(path)
    assert settings.problems == []
    shard = plan_parallel(settings, World(0, 2, 0, 2)).dist.shard
    assert shard is not None
    assert (shard.wrap, shard.min_parameters) == ("size", 1000)


# Of one machine, and of wrapping by class.
NOT_ASKED = (
    "launch.machine_rank", "launch.main_address", "launch.main_port", "launch.rendezvous", "fsdp.min_parameters",
)  # fmt: skip


def test_choices_on_a_terminal_by_word_and_by_number(home: Path) -> None:
    answers = {
        "hold the whole model": b"fsdp\n",
        "Leave accelerators alone": b"yes\n",
        "What is sharded?": b"1\n",
    }
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "windlass", "config"]
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, close_fds=True)
    os.close(slave)
    screen = ""
    for question in QUESTIONS:
        if question.key.name in NOT_ASKED:
            continue
        screen = _until(master, screen, question)
        os.write(master, next((text for start, text in answers.items() if start in question.text), b"\n"))
    while _read(master):
        pass
    assert child.wait(timeout=100) == 0
    document = yaml.safe_load((home / "default_config.yaml").read_text())
    assert (document["distributed_type"], document["use_cpu"]) == ("FSDP", True)
    assert document["fsdp_config"]["fsdp_sharding_strategy"] == "shard_grad_op"


def _until(master: int, screen: str, question: Question) -> str:
    """Read what is printed until the question is there; return what came after it."""
    while question.text not in screen:
        more = _read(master)
        assert more, f"{question.text!r} never came; the screen ends with {screen[-500:]!r}"
        screen += more
    return screen.partition(question.text)[2]


def _read(master: int) -> str:
    try:
        return os.read(master, 4096).decode(errors="ignore")
    except OSError:  # the child has closed its side
        return ""


def test_default_asks_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--default"], ["default"], ["default", "--mixed_precision", "bf16"]):
        assert main(["config", *words]) == 0
    document = yaml.safe_load((home / "default_config.yaml").read_text())
    assert document["mixed_precision"] == "bf16"
    assert main(["config", "default", "--mixed_precision", "fp12"]) == 2
    assert "--mixed_precision='fp12'" in capsys.readouterr().err
    assert main(["config", "--config_file", str(home)]) == 2
    said = capsys.readouterr()
    assert "is a folder" in said.err
    assert not said.out, "no question was asked"


def test_a_folder_that_cannot_be_made_is_named_before_the_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["config", "--config_file", str(tmp_path / "file" / "a.yaml")]) == 2
    said = capsys.readouterr()
    assert "--config_file=" in said.err
    assert "its folder cannot be made (Not a directory)" in said.err or "(File exists)" in said.err
    assert not said.out


def test_update_keeps_what_means_something(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "old.json.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_proceses: 2\nnum_machines: 1\n"
        "fsdp_config: {fsdp_ofload: true}\n"
    )
    assert main(["config", "update", "--config_file", str(path)]) == 0
    assert yaml.safe_load(path.read_text()) == {
        "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "num_machines": 1, "fsdp_config": {},
    }  # fmt: skip
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        f"removed {name}, which means nothing here" for name in ("num_proceses", "fsdp_config.fsdp_ofload")
    ]
    assert main(["config", "update", "--config_file", str(home / "absent.yaml")]) == 2
    for words in ([], ["update"], ["update", "--default"]):
        assert main(["config", *words, "--mixed_precision", "bf16", "--config_file", str(path)]) == 2
        assert "--mixed_precision='bf16': is for the default file" in capsys.readouterr().err


def test_update_leaves_a_file_of_another_kind_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(written := "task: sft\ndata: {train: rows.jsonl}\n")
    assert main(["config", "update", "--config_file", str(path)]) == 2
    assert path.read_text() == written
    assert "no key of a launch file" in capsys.readouterr().err


def test_a_json_file_stays_one(home: Path) -> None:
    path = home / "launch.json"
    assert main(["config", "--default", "--config_file", str(path)]) == 0
    document = json.loads(path.read_text())
    assert (document["num_processes"], document["mixed_precision"]) == (1, "no")
    path.write_text('{"num_processes": 2, "num_proceses": 3}')
    assert main(["config", "update", "--config_file", str(path)]) == 0
    assert json.loads(path.read_text()) == {"num_processes": 2}
    settings = from_file(path)
    assert (settings.problems, settings["launch.processes"].value) == ([], 2)
