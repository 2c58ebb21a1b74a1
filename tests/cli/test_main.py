"""The words of the command line."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from windlass import __version__
from windlass.cli.command_line import LAUNCH_VARIABLE
from windlass.cli.main import TrainOptions, _parsers, _train_options, main
from windlass.cli.train import resume_command


def options(*words: str) -> TrainOptions:
    parser, train = _parsers()
    known, rest = parser.parse_known_args(["train", *words])
    return _train_options(known, rest, train)


def test_words_may_stand_anywhere() -> None:
    wanted = TrainOptions("a.yaml", ["b=1", "c.d=2"], "out", True, False, True)
    assert options("a.yaml", "b=1", "--dry-run", "c.d=2", "--output-dir", "out", "--resume") == wanted
    assert options("--resume", "a.yaml", "b=1", "--output-dir", "out", "--dry-run", "c.d=2") == wanted


def test_resume_may_name_a_checkpoint() -> None:
    assert options("a.yaml", "--resume", "runs/a/checkpoint-3").resume == "runs/a/checkpoint-3"
    assert options("--resume", "b=1").resume is True


@pytest.mark.parametrize("words", [["a.yaml", "b.yaml"], ["--dryrun"], ["--nonsense"]])
def test_what_is_not_understood_is_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", *words])
    assert caught.value.code == 2
    assert "usage: windlass train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train"], "windlass train --resume"),
        (["train", "a b.yaml", "x=1"], "windlass train 'a b.yaml' x=1 --resume"),
        (["train", "--resume", "a.yaml"], "windlass train a.yaml --resume"),
        (["train", "a.yaml", "--resume", "runs/checkpoint-1", "x=1"], "windlass train a.yaml x=1 --resume"),
        (["train", "a.yaml", "--resume=runs/checkpoint-1"], "windlass train a.yaml --resume"),
    ],
)
def test_the_command_that_resumes(words: list[str], command: str) -> None:
    assert resume_command(words) == command


def test_the_command_that_resumes_a_job_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert resume_command(["train"]) == "torchrun --nproc-per-node 4 -m windlass train --resume"


LAUNCHED = ["--num_processes", "2", "--log_dir", "my logs", "-m", "windlass", "train", "a.yaml", "x=1"]


def test_the_command_that_resumes_a_launched_recipe_launches_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--print", "--cpu", *LAUNCHED]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith(LAUNCH_VARIABLE))
    (word,) = shlex.split(line)
    monkeypatch.setenv(*word.split("=", 1))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    again = (
        "windlass launch --cpu --num_processes 2 --log_dir 'my logs' -m windlass train a.yaml x=1 --resume"
    )
    assert resume_command(["train", "a.yaml", "x=1"]) == again
    monkeypatch.setenv(LAUNCH_VARIABLE, '["script.py"]')  # which started this command
    assert resume_command(["train", "b.yaml"]).startswith("torchrun")


def test_version_and_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"windlass {__version__}\n"
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "torch" in shown
    assert "python" in shown


def test_the_environment_tells_what_a_launch_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "default_config.yaml").write_text("num_processes: 2\nmixed_precision: bf16\n")
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path))
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert str(tmp_path / "default_config.yaml") in shown
    assert "launch.processes" in shown
    assert "'bf16' (mixed_precision in " in shown


def test_config_errors_come_before_heavy_imports() -> None:
    code = (
        "import sys; from windlass.cli.main import main; "
        "assert main(['train', 'data.blok_size=3']) == 2; assert main(['train', '--print-config']) == 0; "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "did you mean data.block_size?" in done.stderr


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from windlass.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'yaml'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_an_unknown_flag_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--num_proceses", "2", "train.py"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--num_proceses; did you mean 'num-processes'?" in said
    assert len(said.splitlines()) == 1
