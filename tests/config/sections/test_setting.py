"""What a field declares holds wherever the arguments are made."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

import pytest

from windlass import HfArgumentParser, TrainingArguments
from windlass.config.sections.setting import STRIDE, rules_of
from windlass.core.errors import ConfigError


@dataclass
class Mine(TrainingArguments):
    """Declares two arguments again, and one of its own."""

    save_steps: float = 5
    push_to_hub: bool = False
    extra: int = 1


def test_rules_hold_for_a_field_that_a_subclass_declares_again() -> None:
    assert rules_of(Mine) == rules_of(TrainingArguments)
    assert rules_of(Mine)["save_steps"].bounds is STRIDE
    for wrong in ({"save_steps": -1}, {"push_to_hub": True}):
        with pytest.raises(ConfigError) as error:
            Mine("out", **wrong)
        assert [problem.field for problem in error.value.problems] == list(wrong)


def test_rules_are_not_options_of_a_flag() -> None:
    (args,) = HfArgumentParser(Mine).parse_args_into_dataclasses(
        ["--output_dir", "out", "--save_every", "5min", "--extra", "2"]
    )
    assert (args.save_every, args.extra) == ("5min", 2)


def test_a_parser_of_another_library_can_copy_what_a_field_declares() -> None:
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Mine):
        options = field.metadata.copy()  # type: ignore[attr-defined]
        parser.add_argument(f"--{field.name}", *options.pop("aliases", []), **options)
    assert parser.parse_args(["--extra", "2", "--optim", "sgd"]).optim == "sgd"


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
