"""Flags with a file of defaults."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from windlass import ModelConfig, ScriptArguments, SFTConfig, TrlParser


@dataclass
class Mine:
    number: int
    word: str = "alpha"
    switch: bool = True


@dataclass
class Reserved:
    config: str = ""


def written(folder: Path, text: str) -> str:
    path = folder / "defaults.yaml"
    path.write_text(text)
    return str(path)


def test_the_command_line_is_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_TEST_NAME", "before")
    path = written(tmp_path, "env:\n  WINDLASS_TEST_NAME: 7\nnumber: 23\nword: beta\nswitch: false\n")
    assert TrlParser(Mine).parse_args_and_config(["--config", path]) == (Mine(23, "beta", False),)
    assert os.environ["WINDLASS_TEST_NAME"] == "7"
    words = [f"--config={path}", "--word", "gamma", "--number", "2"]
    assert TrlParser([Mine]).parse_args_and_config(words) == (Mine(2, "gamma", False),)


def test_without_a_file(tmp_path: Path) -> None:
    assert TrlParser(Mine).parse_args_and_config(["--number", "5"]) == (Mine(5),)


@dataclass
class Optionals:
    number: int | None = 3
    word: str | None = "alpha"


@pytest.mark.parametrize("text", ["none", "null", "None"])
def test_an_optional_number_may_be_none_and_text_stays_text(text: str, tmp_path: Path) -> None:
    """As in TRL 1.16."""
    expected = (Optionals(None, text),)
    assert TrlParser(Optionals).parse_args_and_config(["--number", text, "--word", text]) == expected
    path = written(tmp_path, f"number: '{text}'\nword: '{text}'\n")
    assert TrlParser(Optionals).parse_args_and_config(["--config", path]) == expected


def test_a_default_in_the_file_counts_as_given(tmp_path: Path) -> None:
    """As it does on the command line: a DeepSpeed configuration with another value contradicts it."""
    path = written(tmp_path, "max_grad_norm: 1.0\n")
    for words in (["--config", path], ["--max_grad_norm", "1.0"]):
        (args,) = TrlParser(SFTConfig).parse_args_and_config(["--output_dir", str(tmp_path), *words])
        assert args.is_given("max_grad_norm")
        assert not args.is_given("weight_decay")


def test_unknown_keys(tmp_path: Path) -> None:
    path = written(tmp_path, "number: 1\nother: 2\n")
    with pytest.raises(ValueError, match=r"Unknown arguments from config file: \['--other', '2'\]"):
        TrlParser(Mine).parse_args_and_config(["--config", path])
    words = ["--config", path, "--more", "3"]
    assert TrlParser(Mine).parse_args_and_config(words, return_remaining_strings=True) == (
        Mine(1), ["--other", "2", "--more", "3"],
    )  # fmt: skip
    assert TrlParser(Mine).parse_args_and_config(
        words, return_remaining_strings=True, separate_remaining_strings=True
    ) == (Mine(1), ["--other", "2"], ["--more", "3"])
    assert TrlParser(Mine).parse_args_and_config(["--config", path], fail_with_unknown_args=False) == (
        Mine(1),
    )


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="env"):
        TrlParser(Mine).parse_args_and_config(["--config", written(tmp_path, "env: 1\nnumber: 1\n")])
    with pytest.raises(ValueError, match="field named 'config'"):
        TrlParser(Reserved)


def test_subcommands_get_the_defaults(tmp_path: Path) -> None:
    parser = TrlParser()
    commands: argparse._SubParsersAction[TrlParser] = parser.add_subparsers(parser_class=TrlParser)
    inner = commands.add_parser("sft", dataclass_types=[Mine])
    assert parser.set_defaults_with_config(number=4) == []
    assert inner.get_default("number") == 4


def test_the_flags_of_a_fine_tuning_script(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "model_name_or_path: base\ndataset_name: data\nuse_peft: true\npacking: true\nlearning_rate: 2.0e-4\n"
        "model_init_kwargs: {dtype: bfloat16}\n",
    )
    script, args, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config(
        [
            "--config",
            path,
            "--use_cpu",
            "--max_length",
            "256",
            "--no_gradient_checkpointing",
            "--bf16",
            "false",
        ]
    )
    assert (script.dataset_name, model.model_name_or_path, model.use_peft) == ("data", "base", True)
    assert (args.packing, args.learning_rate, args.max_length, args.bf16) == (True, 2e-4, 256, False)
    assert args.gradient_checkpointing is False
    assert args.model_init_kwargs == {"dtype": "bfloat16"}
