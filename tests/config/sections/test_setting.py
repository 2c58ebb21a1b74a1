"""What a field declares holds wherever the arguments are made."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from windlass import HfArgumentParser, TrainingArguments
from windlass.config.sections.setting import INTERVAL, rules_of
from windlass.core.errors import ConfigError


@dataclass
class Mine(TrainingArguments):
    """Declares two arguments again, and one of its own."""

    save_steps: float = 5
    push_to_hub: bool = False
    extra: int = 1


def test_rules_hold_for_a_field_that_a_subclass_declares_again() -> None:
    assert rules_of(Mine) == rules_of(TrainingArguments)
    assert rules_of(Mine)["save_steps"].bounds is INTERVAL
    for wrong in ({"save_steps": 0}, {"trackio_static_space_id": "a/b"}):
        with pytest.raises(ConfigError) as error:
            Mine("out", **wrong)
        assert [problem.field for problem in error.value.problems] == list(wrong)


def test_rules_are_not_options_of_a_flag() -> None:
    (args,) = HfArgumentParser(Mine).parse_args_into_dataclasses(
        ["--output_dir", "out", "--save_every", "5min", "--extra", "2"]
    )
    assert (args.save_every, args.extra) == ("5min", 2)


def test_a_parser_of_another_library_reads_every_field() -> None:
    parser = pytest.importorskip("trl.scripts._hf_argparser").HfArgumentParser(Mine)
    words = {
        "save_every": "5min",
        "report_to": "none",
        "resume_from_checkpoint": "out/checkpoint-1",
        "fsdp": "full_shard",
    }
    flags = [word for name, value in words.items() for word in (f"--{name}", value)]
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", "--extra", "2", *flags])
    assert args.extra == 2
    assert {name: getattr(args, name) for name in words} == {**words, "report_to": []}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("save_every", "soon", "must be a time"),
        ("save_host_memory", "8 boxes", "must be a size"),
        ("optim_args", "a", "name=value, name=value"),
        ("torch_compile_mode", "fast", "must be one of default"),
        ("include_for_metrics", ["inputs", "labels"], "must be one of inputs, loss"),
        ("adam_beta1", 1.0, "below 1"),
    ],
)
def test_a_value_that_breaks_its_own_rule_is_named(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        TrainingArguments("out", **{name: value})  # type: ignore[arg-type]
    assert [problem.field for problem in error.value.problems] == [name]
