"""HfArgumentParser: what scripts declare and type reads the same as in transformers, and old flags still parse."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.compat.parser import HfArg, HfArgumentParser, string_to_bool
from windlass.compat.trl_parser import TrlParser
from windlass.config.arguments import TrainingArguments, source_of


class Mode(Enum):
    FAST = "fast"
    EXACT = "exact"
    SEVEN = 7


@dataclass
class Basics:
    count: int
    ratio: float
    title: str
    flag: bool


@dataclass
class Switches:
    off: bool = False
    on: bool = True
    unknown: bool | None = None
    said: bool | None = False


@dataclass
class Undecided:
    maybe: bool | None


@dataclass
class Choices:
    mode: Mode = Mode.FAST
    word: Literal["a", "b", 42] = "a"
    needed: Literal["x", "y"] = field(metadata={"help": "must be said"}, kw_only=True)

    def __post_init__(self) -> None:
        self.mode = Mode(self.mode)


@dataclass
class Mixed:
    size: int | str = "8"
    share: str | float = 0.5
    either: int | str | None = None


@dataclass
class Lists:
    numbers: list[int] = field(default_factory=lambda: [1, 2])
    words: list[str] = field(default_factory=list)
    maybe: list[float] | None = None


@dataclass
class Options:
    number: int | None = None
    share: Optional[float] = field(default=0.5, metadata={"help": "a share"})  # noqa: UP045
    path: str | None = None
    either: dict[str, Any] | str | None = None


@dataclass
class Aliased:
    example: str = HfArg(default="x", aliases=["--ex", "-e"], help="an example")
    single: int = HfArg(default=1, aliases="-s")


LINES: list[tuple[Any, list[str]]] = [
    (Basics, ["--count", "3", "--ratio", "0.5", "--title", "t", "--flag"]),
    (Basics, ["--count=3", "--ratio=1e-3", "--title", "a b", "--flag", "no"]),
    (Switches, []),
    (Switches, ["--off", "--no_on", "--unknown", "true", "--said"]),
    (Switches, ["--off", "false", "--no-on", "--said", "0"]),
    (Switches, ["--on", "f", "--off", "Y"]),
    (Undecided, []),
    (Undecided, ["--maybe", "no"]),
    (Choices, ["--needed", "x"]),
    (Choices, ["--needed", "y", "--mode", "exact", "--word", "42"]),
    (Choices, ["--needed", "y", "--mode", "7", "--word", "b"]),
    (Lists, []),
    (Lists, ["--numbers", "3", "--words", "a", "b", "--maybe", "1", "2.5"]),
    (Options, []),
    (Options, ["--number", "4", "--share", "0.25", "--path", "p", "--either", "{}"]),
    (Aliased, ["-e", "y", "-s", "4"]),
    (Aliased, ["--ex", "z"]),
]


def _both(types: Any) -> tuple[HfArgumentParser, Any]:
    transformers = pytest.importorskip("transformers")
    return HfArgumentParser(types), transformers.HfArgumentParser(types)


@pytest.mark.parametrize(
    ("dtype", "words"), LINES, ids=lambda x: x.__name__ if isinstance(x, type) else " ".join(x)
)
def test_reads_as_scripts_expect(dtype: Any, words: list[str]) -> None:
    ours, theirs = (p.parse_args_into_dataclasses(words, look_for_args_file=False) for p in _both(dtype))
    assert ours == theirs


_PARTS = st.sampled_from(
    ["--off", "--off=no", "--on=0", "--no_on", "--unknown yes", "--said", "--no-said", "--numbers 3 4", "--words a",
     "--words", "--maybe 1e-3", "--number 7", "--number x", "--share .5", "--path=a=b", "--either {}", "--numb 1",
     "--strange", "extra"]
)  # fmt: skip


@given(st.lists(_PARTS, max_size=6))
def test_any_line_reads_as_scripts_expect(parts: list[str]) -> None:
    """The same instances and the same words left over, or both stop with code 2."""
    words = [word for part in parts for word in part.split()]
    outcomes = []
    for parser in _both((Switches, Lists, Options)):
        try:
            outcomes.append(parser.parse_args_into_dataclasses(words, return_remaining_strings=True))
        except SystemExit as stop:
            outcomes.append(stop.code)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("dtype", [Basics, Switches, Undecided, Choices, Lists, Options, Aliased])
def test_has_the_same_flags(dtype: Any) -> None:
    """Every flag, with its destination, whether it is required, its choices and its default."""

    def flags(parser: argparse.ArgumentParser) -> dict[str, Any]:
        return {
            option: (a.dest, a.required, list(a.choices or []), a.nargs, a.const, a.default)
            for a in parser._actions
            for option in a.option_strings
        }

    ours, theirs = _both(dtype)
    assert flags(ours) == flags(theirs)


def test_takes_every_flag_of_their_arguments() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.HfArgumentParser(transformers.TrainingArguments)
    assert set(theirs._option_string_actions) <= set(
        HfArgumentParser(TrainingArguments)._option_string_actions
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--count", "x"],
        ["--count", "1"],
        ["--mode", "slow", "--needed", "x"],
        ["--word", "c", "--needed", "x"],
    ],
)
def test_a_wrong_word_stops_with_code_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        HfArgumentParser([Basics] if "--count" in words else [Choices]).parse_args_into_dataclasses(words)
    assert stop.value.code == 2


def test_several_dataclasses_a_namespace_and_the_rest() -> None:
    parser = HfArgumentParser((Switches, Options))
    parser.add_argument("--extra", type=int, default=1)
    switches, options, namespace, rest = parser.parse_args_into_dataclasses(
        ["--off", "--number", "3", "--extra", "5", "--strange", "1"], return_remaining_strings=True
    )
    assert (switches.off, options.number, namespace.extra, rest) == (True, 3, 5, ["--strange", "1"])
    with pytest.raises(ValueError, match=r"--numbr.*did you mean '--number'"):
        parser.parse_args_into_dataclasses(["--numbr", "1"])


def test_words_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.args").write_text("--number 1 --path beside")
    (tmp_path / "first.args").write_text("--number 2")
    (tmp_path / "second.args").write_text("--number 3\n--share 0.1")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "script.py"), "--share", "0.9"])
    parser = HfArgumentParser(Options)
    assert parser.parse_args_into_dataclasses() == (Options(number=1, share=0.9, path="beside"),)
    assert parser.parse_args_into_dataclasses(look_for_args_file=False) == (Options(share=0.9),)
    by_name = parser.parse_args_into_dataclasses(["--path", "p"], args_filename=str(tmp_path / "first.args"))
    assert by_name == (Options(number=2, path="p"),)
    flags = ["--more", str(tmp_path / "first.args"), "--more", str(tmp_path / "second.args"), "--path", "p"]
    assert parser.parse_args_into_dataclasses(flags, args_file_flag="--more") == (
        Options(number=3, share=0.1, path="p"),
    )
    # Unlike the file beside the script, these were asked for.
    with pytest.raises(FileNotFoundError, match=r"frist\.args"):
        parser.parse_args_into_dataclasses(["--path", "p"], args_filename=str(tmp_path / "frist.args"))
    with pytest.raises(FileNotFoundError, match=r"frist\.args"):
        parser.parse_args_into_dataclasses(["--more", str(tmp_path / "frist.args")], args_file_flag="--more")


def test_dicts_and_files(tmp_path: Path) -> None:
    values = {"number": 3, "path": "p", "off": True}
    wanted = (Options(number=3, path="p"), Switches(off=True))
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text("number: 3\npath: p\n'off': yes\n")
    parser = HfArgumentParser([Options, Switches])
    assert parser.parse_dict(values) == wanted
    assert parser.parse_json_file(tmp_path / "a.json") == wanted
    assert parser.parse_yaml_file(str(tmp_path / "a.yaml")) == wanted
    with pytest.raises(ValueError, match=r"numbr.*did you mean 'number'"):
        parser.parse_dict({"numbr": 1})
    assert parser.parse_dict({"numbr": 1}, allow_extra_keys=True) == (Options(), Switches())


def test_arguments_know_where_each_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sources(found: tuple[Any, ...]) -> dict[str, str]:
        names = ("learning_rate", "seed", "eval_strategy", "weight_decay", "optim")
        return {name: source_of(found[0], name) for name in names if found[0].is_given(name)}

    (tmp_path / "script.args").write_text("--learning_rate 0.1 --seed 2")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "script.py"), "--seed", "3", "--weight-dec", "0.5"])
    parser = HfArgumentParser(TrainingArguments)
    assert sources(parser.parse_args_into_dataclasses()) == {
        "learning_rate": str(tmp_path / "script.args"),
        "seed": "the command line",
        "weight_decay": "the command line",
    }
    old = parser.parse_args_into_dataclasses(["--evaluation_strategy", "epoch"], look_for_args_file=False)
    assert sources(old) == {"eval_strategy": "the command line"}
    file = tmp_path / "a.yaml"
    file.write_text("# settings\nseed: 3\nevaluation_strategy: epoch\n")
    assert sources(parser.parse_yaml_file(file)) == {"seed": f"{file}:2", "eval_strategy": f"{file}:3"}
    assert sources(parser.parse_dict({"seed": 3})) == {"seed": "the script"}
    (tmp_path / "script.args").unlink()
    mixed = TrlParser(TrainingArguments).parse_args_and_config(
        ["--config", str(file), "--learning_rate", "1"]
    )
    assert sources(mixed) == {
        "seed": f"{file}:2",
        "eval_strategy": f"{file}:3",
        "learning_rate": "the command line",
    }


@dataclass
class ScriptData:
    task_name: str | None = None
    overwrite_output_dir: bool = field(default=False, metadata={"help": "a script's own"})


def test_old_flags_of_arguments_parse() -> None:
    line = (
        "--output_dir o --evaluation_strategy epoch --warmup-ratio 0.1 --group_by_length --no_cuda --logging_dir l "
        "--per_gpu_train_batch_size 4 --overwrite_output_dir --fp16_backend auto --save_safetensors true"
    )
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line.split())
    assert (args.eval_strategy, args.warmup_steps, args.use_cpu) == ("epoch", 0.1, True)
    assert (args.train_sampling_strategy, args.per_device_train_batch_size) == ("group_by_length", 4)
    assert args.overwrite_output_dir is True
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--save_safetensors", "false"])
    assert args.save_safetensors is False


def test_a_scripts_own_flag_wins_over_an_old_name() -> None:
    data, args = HfArgumentParser((ScriptData, TrainingArguments)).parse_args_into_dataclasses(
        ["--overwrite_output_dir", "--output_dir", "o", "--evaluation_strategy", "no"]
    )
    assert data.overwrite_output_dir is True
    assert args.overwrite_output_dir is False


def test_old_keys_in_a_dict() -> None:
    args, data = HfArgumentParser((TrainingArguments, ScriptData)).parse_dict(
        {"evaluation_strategy": "epoch", "learning_rate": "5e-5", "task_name": "sst2"}
    )
    assert (args.eval_strategy, args.learning_rate, data.task_name) == ("epoch", 5e-5, "sst2")


def test_a_note_is_given_for_what_the_line_mentions_and_not_for_defaults(said: list[str]) -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.parse_args_into_dataclasses(["--output_dir", "o"])
    assert not said
    parser.parse_args_into_dataclasses(["--output_dir", "o", "--logging_nan_inf_filter"])
    assert any("logging_nan_inf_filter" in message for message in said)


def test_help_shows_flags_and_defaults_and_hides_old_names() -> None:
    text = HfArgumentParser(TrainingArguments).format_help()
    assert "--learning_rate" in text
    assert "(default: 5e-05)" in text
    assert "evaluation_strategy" not in text


@given(st.sampled_from(["yes", "TRUE", "t", "Y", "1", "no", "False", "F", "n", "0", "maybe", "", "2"]))
def test_truth_values(text: str) -> None:
    if text.lower() in ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"):
        assert string_to_bool(text) is (text.lower() in ("yes", "true", "t", "y", "1"))
    else:
        with pytest.raises(argparse.ArgumentTypeError):
            string_to_bool(text)


def test_a_union_that_one_flag_cannot_tell_apart_is_refused() -> None:
    made = dataclasses.make_dataclass("Made", [("x", int | float, 1)])
    with pytest.raises(ValueError, match="one type"):
        HfArgumentParser(made)


@pytest.mark.parametrize("words", [[], ["--size", "9", "--share", "1"], ["--either", "3"]])
def test_numbers_that_may_be_text_are_numbers(words: list[str]) -> None:
    from transformers import HfArgumentParser as Theirs

    found, wanted = (
        repr(kind(Mixed).parse_args_into_dataclasses(words)[0]) for kind in (HfArgumentParser, Theirs)
    )
    assert found == wanted
    assert HfArgumentParser(Mixed).parse_args_into_dataclasses(["--size", "large"])[0].size == "large"
