"""The words of the command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass import __version__
from windlass.cli import environment_command, train_command
from windlass.cli.main import main
from windlass.cli.resume_words import resume_command
from windlass.cli.train_command import read_options
from windlass.core import output
from windlass.core.world import LAUNCH_VARIABLE


def test_words_may_stand_anywhere() -> None:
    for words in (
        ["a.yaml", "b=1", "--dry-run", "c.d=2", "--output-dir", "out", "--resume"],
        ["--resume", "a.yaml", "b=1", "--output-dir", "out", "--dry-run", "c.d=2"],
    ):
        found = read_options(words)
        assert (found.recipe, found.overrides, found.output_dir) == ("a.yaml", ["b=1", "c.d=2"], "out")
        assert found.resume is found.dry_run is True
        left_out = ("print_config", "all", "tiny", "json", "search")
        assert not any(getattr(found, name) for name in left_out)


def test_the_path_of_a_recipe_may_have_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (recipe := tmp_path / "lr=0.1" / "my.yaml").parent.mkdir()
    recipe.touch()
    found = read_options(["lr=0.1/my.yaml", "training.seed=3"])
    assert (found.recipe, found.overrides) == ("lr=0.1/my.yaml", ["training.seed=3"])


@pytest.mark.parametrize(
    "words",
    ["status URL", "ps URL", "report URL", "ui URL", "init sst2 URL", "merge-weights . URL", "config --config_file URL",
     "convert-config my.yaml --output URL", "launch --log_dir URL my.py"],
)  # fmt: skip
def test_a_url_is_not_taken_for_a_folder_of_this_machine(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").touch()
    assert main(words.replace("URL", "s3://me:hunter2@host/x.yaml").split()) == 2
    said = capsys.readouterr().err
    assert "is a URL" in said
    assert "hunter2" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["my.py"]


def test_resume_may_name_a_checkpoint() -> None:
    assert read_options(["a.yaml", "--resume", "runs/a/checkpoint-3"]).resume == "runs/a/checkpoint-3"
    options = read_options(["--resume", "b=1", "b=2"])
    assert options.resume is True
    assert options.overrides == ["b=1", "b=2"]


@pytest.mark.parametrize("words", [["a.yaml", "b.yaml"], ["--dryrun"], ["--nonsense"]])
def test_what_is_not_understood_is_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", *words])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("windlass train: ")
    assert said.endswith("see: windlass train --help\n")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train"], "windlass train --resume"),
        (["train", "a b.yaml", "x=1"], "windlass train 'a b.yaml' x=1 --resume"),
        (["train", "--resume", "a.yaml"], "windlass train a.yaml --resume"),
        (["train", "a.yaml", "--resume", "runs/checkpoint-1", "x=1"], "windlass train a.yaml x=1 --resume"),
        (["train", "a.yaml", "--resume=runs/checkpoint-1"], "windlass train a.yaml --resume"),
        (["train", "a.yaml", "--search", "space.yaml"], "windlass train a.yaml --search space.yaml"),
    ],
)
def test_the_command_that_resumes(words: list[str], command: str) -> None:
    assert resume_command(words) == command


def test_a_checkpoint_may_lie_below_a_folder_with_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1" / "checkpoint-3").mkdir(parents=True)
    for checkpoint in ("lr=0.1/checkpoint-3", "runs/lr=0.1/checkpoint-2"):  # the second was removed
        words = ["a.yaml", "--resume", checkpoint]
        assert read_options(words).resume == checkpoint
        assert resume_command(["train", *words]) == "windlass train a.yaml --resume"


AFTER_RESUME = ("auto", "runs/checkpoint-3", "runs/lr=1/checkpoint-3", "my.yaml", "sst2", "a.b=c")
PIECES = [
    *(["sst2"], ["my.yaml"], ["training.max_steps=3"], ["data.train=a b.txt"], ["--tiny"], ["--dry-run"]),
    *(["--output-dir", "out"], ["--output-dir=out"], ["training.output_dir=x"], ["--resume"]),
    *(["--resume", word] for word in AFTER_RESUME),
    *([f"--resume={word}"] for word in AFTER_RESUME),
]


@given(st.lists(st.sampled_from(PIECES), max_size=5))
def test_the_command_that_resumes_trains_the_same(pieces: list[list[str]]) -> None:
    words = [word for piece in pieces for word in piece]
    try:
        typed = read_options(words)
    except SystemExit:  # as of two recipes
        return
    command = shlex.split(resume_command(["train", *words]))
    again = read_options(command[command.index("train") + 1 :])
    assert again.resume is True
    for name in ("recipe", "overrides", "output_dir", "tiny"):
        assert getattr(again, name) == getattr(typed, name)


@pytest.mark.parametrize(
    "words",
    [
        ["init", "digits", "file/recipe.yaml"],
        ["convert-config", "theirs.yaml", "--output", "absent/recipe.yaml"],
        ["checkpoint", "ls", "file/run"],
    ],
)
def test_a_file_that_cannot_be_written_is_named_in_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "theirs.yaml").write_text("model_name_or_path: hub/model\ndataset_name: hub/data\n")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("windlass: ")
    assert words[-1].partition("/")[0] in line


def test_a_training_that_loses_a_connection_is_not_taken_for_a_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(words: list[str]) -> int:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            return os.write(writer, b"to a worker, or a tracker")
        finally:
            os.close(writer)

    monkeypatch.setattr(train_command, "train_command", broken)
    with pytest.raises(BrokenPipeError):
        main(["train"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_answer_that_a_full_disk_cuts_short_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_reported", set())
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(writer, "w") as unread, open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", unread)
        assert main(["schema"]) == 0, "a reader such as head takes no more than it needs"
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["schema"]) == 2
        assert "standard output cannot be written" in capsys.readouterr().err
        os.dup2(nowhere.fileno(), full.fileno())  # where what it holds goes when it is closed


def test_commands_to_copy_are_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "digits", "my own/recipe.yaml"]) == 0
    assert "windlass train 'my own/recipe.yaml'\n" in capsys.readouterr().out
    assert "windlass train 'my own/recipe.yaml'" in Path("my own/recipe.yaml").read_text()
    assert main(["config", "--default", "--config_file", "my own/launch.yaml"]) == 0
    assert "windlass launch --config_file 'my own/launch.yaml' script.py" in capsys.readouterr().out


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
    assert re.search(rf"^windlass +{re.escape(__version__)} \(.*windlass\)$", shown, re.MULTILINE)


@pytest.mark.parametrize("found", ["0.1.1", None])
def test_a_distribution_that_writes_into_the_same_package_is_named(
    found: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment_command, "version_of", lambda name: found)
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert ("windlass 0.1.1" in shown) == ("pip uninstall windlass windlass-trainer" in shown) == bool(found)


def test_training_by_a_recipe_asks_for_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["train"]) == 2
    assert 'pip install "windlass-trainer[train]"' in capsys.readouterr().err


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


def test_help_and_mistakes_import_nothing_heavy() -> None:
    """Of any command, so that it is on the screen at once."""
    code = (
        "import sys; from windlass.cli.main import COMMANDS, main\n"
        "def heavy(): return {'torch', 'transformers', 'datasets', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "def ends(*words):\n"
        "    try: main(words)\n"
        "    except SystemExit as end: return end.code\n"
        "assert ends('--help') == 0 and not heavy() | ({'numpy', 'yaml'} & set(sys.modules))\n"
        "for name in COMMANDS:\n"
        "    assert ends(name, '--help') == 0 and not heavy(), name\n"
        "for words in ['trian'], ['launch'], ['train', '--lr', '1'], ['checkpoint', 'lss']:\n"
        "    assert ends(*words) == 2 and not heavy(), words\n"
        "assert main(['version']) == main(['explain', 'precision']) == 0 and not heavy()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian"], "unknown command 'trian'"),
        (["trian"], "did you mean 'train'?"),
        (["--versoin"], "did you mean '--version'?"),
        (["checkpoint", "lss"], "did you mean 'ls'?"),
        (["checkpoint"], "example: windlass checkpoint ls runs"),
        (["launch"], "SCRIPT missing; example: windlass launch --num_processes 2 train.py"),
        (["run"], "SCRIPT missing; example: windlass run train.py"),
        (["convert-config"], "windlass convert-config: FILE missing; example"),
        (["data", "show"], "windlass data show: RECIPE.yaml | FILE missing"),
        (["estimate-memory", "x", "--dtypes", "flot32"], "did you mean 'float32'?"),
        (["train", "--learning_rate", "3e-4"], "write training.learning_rate=3e-4;"),
        (["train", "--block-size=64", "--dryrun"], "write data.block_size=64; did you mean '--dry-run'?"),
        (["train", "--max_steps", "a.yaml"], "write training.max_steps=a.yaml"),
        (["train", "--bf16", "--learning-rate", "x=1"], "training.bf16=VALUE training.learning_rate=VALUE"),
        (["train", "sums.jsonl"], "sums.jsonl is data and not a recipe: write data.train=sums.jsonl"),
        (["train", "my.yaml", "a.csv.gz"], "write data.train=a.csv.gz"),
    ],
)
def test_what_is_mistyped_is_answered_with_what_was_meant(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert hint in said
    assert len(said.splitlines()) == 1


def test_a_folder_does_not_hide_the_recipe_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`training.output_dir=dpo` makes one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dpo").mkdir()
    assert main(["train", "dpo", "training.max_stepss=4"]) == 2
    assert "training.max_stepss" in capsys.readouterr().err


def test_the_help_of_a_launch_lists_what_has_an_effect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    shown = capsys.readouterr().out
    for line in (
        "--num_processes N ",
        "--engine {local,slurm,ray}",
        "--environment NAME=VALUE",
        "(default: 30.0)",
    ):
        assert line in shown
    titles = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:4] == ["options:", "the script:", "processes and machines:", "training:"]
    # One spelling of each, and neither flags that are refused nor those without an effect.
    for hidden in ("--num-processes", "--use_megatron_lm", "--same_network"):
        assert hidden not in shown


def test_an_unknown_flag_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--num_proceses", "2", "train.py"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--num_proceses; did you mean '--num_processes'?" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "known"), [(["env", "--json"], "torch"), (["recipes", "--json"], "python-docs")]
)
def test_facts_for_programs(words: list[str], known: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert known in (found if isinstance(found, dict) else [one["name"] for one in found])
