"""Every flag of the real `accelerate launch` is understood here, in the same form."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from tests.versions import needs

from windlass.cli.launching.launch_flags import add_launch_flags
from windlass.config.parallel.table import FLAGS


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_launch_flags(made)
    return made


def _peer() -> list[argparse.Action]:
    from accelerate.commands.launch import launch_command_parser

    return [action for action in launch_command_parser()._actions if action.option_strings]


@needs("accelerate", "1.10", "older ones have flags that are gone")
def test_every_spelling_is_known_and_takes_a_value_where_theirs_does() -> None:
    own = {word: action for action in parser()._actions for word in action.option_strings}
    for action in _peer():
        for word in action.option_strings:
            assert word in own, word
            assert (own[word].nargs == 0) == (action.nargs == 0), word


@needs("accelerate", "1.10", "older ones have flags that are gone")
def test_every_flag_of_theirs_means_a_setting_or_how_the_script_starts() -> None:
    how = {"help", "config_file", "module", "no_python"}
    meant = {action.dest for action in _peer()} - how
    assert meant - set(FLAGS) == set()


def test_what_was_not_said_is_absent() -> None:
    said = vars(
        parser().parse_args(["--num-processes", "2", "train.py", "--lr", "1", "--num_processes", "9"])
    )
    assert said == {
        "config_file": None, "module": False, "no_python": False, "compat": False, "print": False,
        "num_processes": "2", "script": "train.py",
        "arguments": ["--lr", "1", "--num_processes", "9"],
    }  # fmt: skip


@pytest.mark.parametrize(("words", "name", "value"), [
    (["-t", "3"], "tee", "3"), (["--use_fsdp"], "use_fsdp", True),
    (["--env", "A=1,2", "--env", "B=3"], "env", ["A=1,2", "B=3"]),
    (["--engine_options", "partition=long"], "engine_options", ["partition=long"]),
])  # fmt: skip
def test_forms(words: list[str], name: str, value: Any) -> None:
    assert vars(parser().parse_args([*words, "x.py"]))[name] == value


def test_the_help_fits_the_settings() -> None:
    text = parser().format_help()
    assert "--num_processes" in text
    assert "--tp_degree" not in text
