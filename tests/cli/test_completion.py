"""`windlass completion`: the script, as the shell runs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from windlass.cli.main import COMMANDS, main

pytest.importorskip("shtab")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="runs bash")
def test_bash_completes_commands_flags_arguments_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").touch()
    expected = {
        "tr": "train",
        "checkpoint d": "diff",
        "checkpoint ls --js": "--json",
        "train --res": "--resume",
        "train my": "my.yaml",
        "launch --max_res": "--max_restarts",
        "launch --same_net": "",  # without effect, so not offered
        "explain learning": "learning_rate",
        "estimate-memory x --dtypes bf": "bfloat16",
        "init sst": "sst2",
        "completion z": "zsh",
    }
    asked = "\n".join(f"ask windlass {words}" for words in expected)
    (tmp_path / "ask.sh").write_text(
        script("bash", capsys)
        + '\nask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_windlass; '
        + f'echo "${{COMPREPLY[*]}}"; }}\n{asked}\n'
    )
    done = subprocess.run(["bash", "ask.sh"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert dict(zip(expected, done.stdout.splitlines(), strict=True)) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    written = script(shell, capsys)
    for word in (*COMMANDS, "--num_processes", "verify", "learning_rate"):
        assert word.removeprefix("--") in written
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=written, text=True, check=True)
