"""TrainingArguments as an object: names, defaults, subclassing, assignment, and that it is pure data."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import pickle
import pydoc
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.versions import with_pinned

from windlass.compat.parser import HfArgumentParser
from windlass.compat.plugins import ParallelismConfig
from windlass.config.arguments import (
    TrainingArguments,
    describe,
    note_sources,
    settings_beside,
    source_of,
)
from windlass.config.validate import check
from windlass.core import logs
from windlass.core.errors import ConfigError
from windlass.finetuning.seq2seq_arguments import Seq2SeqTrainingArguments
from windlass.finetuning.sft_config import SFTConfig


def _default(spec: dataclasses.Field[Any]) -> Any:
    return spec.default if spec.default is not dataclasses.MISSING else spec.default_factory()  # type: ignore[misc]


@with_pinned("transformers")
def test_names_order_and_defaults_are_those_that_scripts_know() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {f.name: _default(f) for f in dataclasses.fields(transformers.TrainingArguments)}
    ours = {f.name: _default(f) for f in dataclasses.fields(TrainingArguments)}
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {name: ours[name] for name in theirs} == theirs
    assert set(ours) - set(theirs) == {
        "nonfinite_policy", "global_batch_size", "save_every", "save_in_background", "save_host_memory",
        "max_save_failures", "keep_last", "keep_best", "preemption_signals", "preemption_deadline", "hub_wait",
        "dataloader_start_timeout", "optim_groups", "layerwise_lr_decay", "torch_compile_blocks",
        "fp8", "fp8_config", "qat", "lean_loss", "alerts",
    }  # fmt: skip


def test_helpers_of_theirs_are_all_there() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {name for name in vars(transformers.TrainingArguments) if not name.startswith("_")}
    fields = {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    missing = {name for name in theirs - fields if not hasattr(TrainingArguments, name)}
    assert missing <= {
        "default_optim",
        "is_torch_greater_or_equal_than_2_8",
    }  # by-products of their class body


@with_pinned("transformers")
def test_derived_values_equal_theirs() -> None:
    """Constructed alike, both hold the same values (as plain data)."""
    transformers = pytest.importorskip("transformers")
    cases: list[dict[str, Any]] = [
        {},
        {"eval_strategy": "steps", "logging_steps": 7},
        {"eval_strategy": "steps", "eval_steps": 0.1, "logging_steps": 0.5},
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"metric_for_best_model": "accuracy", "eval_strategy": "epoch"},
        {"metric_for_best_model": "eval_loss"},
        {"torch_compile": True},
        {"torch_compile_mode": "default"},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": '{"use_reentrant": "false"}'},
        {"gradient_checkpointing": True},
        {"include_num_input_tokens_seen": True},
        {
            "lr_scheduler_kwargs": '{"num_cycles": 2, "min_lr": "0.5"}',
            "lr_scheduler_type": "cosine_with_min_lr",
        },
        {"logging_steps": 3.0, "save_steps": 2.0},
    ]
    for case in cases:
        theirs = transformers.TrainingArguments(output_dir="out", use_cpu=True, **case).to_dict()
        ours = TrainingArguments(output_dir="out", use_cpu=True, **case).to_dict()
        different = {n: (theirs[n], ours[n]) for n in theirs if theirs[n] != ours[n]}
        assert different.keys() <= {"hub_token", "accelerator_config"}, (
            case,
            different,
        )  # they hide a missing token
        assert ours["dataloader_pin_memory"] is False


def test_importing_and_constructing_loads_no_torch_and_makes_no_folder(tmp_path: Path) -> None:
    code = (
        "import sys, os; from windlass.config.arguments import TrainingArguments\n"
        "from windlass.compat import parser, refused_names\n"
        "args = TrainingArguments('never/made', evaluation_strategy='epoch')\n"
        "args.world_size, args.should_log, str(args)\n"
        "bad = [m for m in ('torch', 'transformers', 'numpy', 'datasets') if m in sys.modules]\n"
        "assert not bad, bad\n"
        "assert os.listdir('.') == [], os.listdir('.')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)


def test_output_dir_is_first_expanded_and_has_a_default() -> None:
    assert TrainingArguments("out").output_dir == "out"
    assert TrainingArguments().output_dir == "trainer_output"
    assert TrainingArguments("~/x").output_dir == os.path.expanduser("~/x")
    assert TrainingArguments(Path("a") / "b").output_dir == os.path.join("a", "b")


@dataclass
class ScriptArguments(TrainingArguments):
    """What training scripts do: further fields, and other defaults."""

    cache_dir: str | None = field(default=None)
    logging_steps: float = field(default=10)
    model_name: str = field(default="tiny")


def test_a_script_may_subclass_it() -> None:
    args = ScriptArguments("out", evaluation_strategy="steps", cache_dir="c")  # type: ignore[call-arg]
    assert (args.eval_strategy, args.eval_steps, args.cache_dir) == ("steps", 10, "c")
    with pytest.raises(ConfigError, match="did you mean 'model_name'"):
        ScriptArguments("out", model_nam="x")  # type: ignore[call-arg]


@dataclass
class SubclassOfOldTimes(TrainingArguments):
    warmup_ratio: float = field(default=0.03)


def test_an_old_name_declared_by_a_subclass_still_counts() -> None:
    assert SubclassOfOldTimes("out").warmup_steps == 0.03
    assert SubclassOfOldTimes("out", warmup_ratio=0.2).warmup_steps == 0.2
    again = dataclasses.replace(SubclassOfOldTimes("out"), seed=1)
    assert (again.seed, again.warmup_steps, again.warmup_ratio) == (1, 0.03, 0.03)


def test_a_subclass_with_its_own_init_gets_new_names() -> None:
    class Own(TrainingArguments):
        def __init__(self, *args: Any, extra: int = 1, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.extra = extra

    args = Own("out", evaluation_strategy="epoch", extra=3)
    assert (args.eval_strategy, args.extra) == ("epoch", 3)


def test_what_was_derived_follows_later_assignments() -> None:
    args = TrainingArguments("out", eval_strategy="steps", load_best_model_at_end=True)
    assert (args.eval_steps, args.metric_for_best_model, args.greater_is_better) == (500, "loss", False)
    args.logging_steps = 20
    args.metric_for_best_model = "accuracy"
    check(args)
    assert (args.eval_steps, args.greater_is_better) == (20, True)
    args.eval_steps = 30
    args.logging_steps = 40
    check(args)
    assert args.eval_steps == 30
    args.eval_strategy = "no"
    args.load_best_model_at_end = False
    check(args)
    assert args.do_eval is False


def test_assignments_are_checked_as_a_whole() -> None:
    args = TrainingArguments("out")
    args.fp16 = args.bf16 = True
    args.learning_rate = "fast"  # type: ignore[assignment]
    with pytest.raises(ConfigError) as error:
        check(args)
    assert {p.field for p in error.value.problems} == {"fp16", "learning_rate"}


@pytest.mark.parametrize("first", ["gradient_checkpointing", "activation_checkpointing"])
def test_the_two_names_of_recomputation_are_one(first: str) -> None:
    for value in (True, False):
        args = TrainingArguments("out", **{first: value})
        assert args.gradient_checkpointing is args.activation_checkpointing is value
        setattr(args, first, not value)
        check(args)
        assert args.gradient_checkpointing is args.activation_checkpointing is (not value)
    copied = dataclasses.replace(TrainingArguments("out"), activation_checkpointing=True)
    assert copied.gradient_checkpointing is True
    with pytest.raises(ConfigError, match="contradicts"):
        TrainingArguments("out", gradient_checkpointing=True, activation_checkpointing=False)


def test_secrets_never_show() -> None:
    with pytest.raises(ConfigError) as error:
        TrainingArguments("memory://out", hub_token="hf_secret", push_to_hub=True)
    assert "hf_secret" not in str(error.value)
    args = TrainingArguments("out")
    args.hub_token = "hf_secret"
    script = ScriptArguments("out")
    script.hub_token = "hf_secret"
    assert args.to_dict()["hub_token"] == "<HUB_TOKEN>"
    for text in (
        str(args),
        repr(args),
        args.to_json_string(),
        str(args.to_sanitized_dict()),
        repr(script),
        str(script),
    ):
        assert "hf_secret" not in text
    assert TrainingArguments(**args.to_dict()).hub_token is None


def test_settings_of_the_hub_are_accepted() -> None:
    settings: dict[str, Any] = {
        "hub_model_id": "me/model", "hub_token": "hf_secret", "hub_strategy": "end", "hub_private_repo": True,
        "hub_always_push": True, "hub_revision": "main",
    }  # fmt: skip
    for push in (False, True):
        args = TrainingArguments("out", push_to_hub=push, **settings)
        assert {name: getattr(args, name) for name in settings} == settings
    with pytest.raises(ConfigError) as error:
        TrainingArguments("memory://out", push_to_hub=True, **settings)
    assert [p.field for p in error.value.problems] == ["push_to_hub"]


def test_what_it_keeps_beside_its_fields_is_text_numbers_and_dicts() -> None:
    # Scripts write `vars(args)` as JSON.
    arguments = TrainingArguments("x", learning_rate=1e-3, evaluation_strategy="no")
    arguments.num_train_epochs = 2
    kept = {
        name: value for name, value in vars(arguments).items() if name not in arguments.__dataclass_fields__
    }
    assert json.loads(json.dumps(kept)) == kept
    assert arguments.is_given("num_train_epochs")


def test_copies_are_equal() -> None:
    args = TrainingArguments("out", eval_strategy="steps", warmup_steps=0.1, gradient_checkpointing=True)
    for again in (copy.deepcopy(args), pickle.loads(pickle.dumps(args)), dataclasses.replace(args)):
        assert again == args
        assert again.to_dict() == args.to_dict()


def test_a_shallow_copy_does_not_reach_back() -> None:
    args = TrainingArguments("out", eval_strategy="steps")
    again = copy.copy(args)
    again.eval_steps = 3
    again.overwrite_output_dir = True
    check(args)
    args.logging_steps = 7
    check(args)
    assert (args.eval_steps, again.eval_steps, args.overwrite_output_dir) == (7, 3, False)


def test_describe_says_what_was_changed() -> None:
    args = TrainingArguments("out", learning_rate=1e-3, eval_strategy="steps")
    changed = {name: value for name, value, default in describe(args) if not default}
    assert changed == {"output_dir": "out", "learning_rate": 1e-3, "eval_strategy": "steps"}
    assert [name for name, _, _ in describe(args)] == [f.name for f in dataclasses.fields(args)]


@pytest.mark.parametrize(("level", "is_default"), [(logs.ERROR, True), (logs.INFO, False)])
def test_a_default_that_follows_from_the_verbosity_is_that_of_now(level: int, is_default: bool) -> None:
    logs.set_verbosity(level)
    found = {name: default for name, _, default in describe(TrainingArguments("out", disable_tqdm=True))}
    assert found["disable_tqdm"] is is_default


def test_an_argument_that_is_assigned_was_set_by_the_script() -> None:
    args = TrainingArguments("out", learning_rate=1e-3, seed=3)
    note_sources(
        args, {"seed": "a.yaml:2", "learning_rate": "the command line"}, {"task": ("dpo", "a.yaml:1")}
    )
    again = copy.copy(args)
    again.seed = 4
    assert [source_of(one, "seed") for one in (args, again)] == ["a.yaml:2", "the script"]
    assert [source_of(one, "learning_rate") for one in (args, again)] == ["the command line"] * 2
    assert source_of(args, "output_dir") == "the script"
    assert settings_beside(again) == {"task": ("dpo", "a.yaml:1")}


def _settings() -> st.SearchStrategy[dict[str, Any]]:
    stride = st.one_of(st.integers(1, 10**6), st.floats(0.001, 0.999))
    values: dict[str, st.SearchStrategy[Any]] = {
        "output_dir": st.sampled_from(["out", "a/b", "~/c"]),
        "per_device_train_batch_size": st.integers(1, 4096),
        "num_train_epochs": st.floats(0.1, 100),
        "max_steps": st.integers(-1, 10**9),
        "learning_rate": st.floats(0, 1),
        "lr_scheduler_type": st.sampled_from(["linear", "cosine", "polynomial", "inverse_sqrt"]),
        "lr_scheduler_kwargs": st.dictionaries(
            st.sampled_from(["power", "num_cycles"]), st.floats(0, 9), max_size=2
        ),
        "warmup_steps": st.one_of(st.integers(0, 10**5), st.floats(0, 0.99)),
        "optim": st.sampled_from(["adamw_torch", "sgd", "adafactor"]),
        "weight_decay": st.floats(0, 1),
        "gradient_accumulation_steps": st.integers(1, 64),
        "max_grad_norm": st.floats(0, 100),
        "bf16": st.booleans(),
        "activation_checkpointing": st.booleans(),
        "activation_checkpointing_kwargs": st.dictionaries(st.just("every_n_layers"), st.integers(1, 9)),
        "torch_compile": st.booleans(),
        "logging_strategy": st.sampled_from(["no", "steps", "epoch"]),
        "logging_steps": stride,
        "eval_strategy": st.sampled_from(["no", "steps", "epoch"]),
        "eval_steps": st.one_of(st.none(), stride),
        "include_for_metrics": st.lists(st.sampled_from(["inputs", "loss"]), unique=True),
        "include_num_input_tokens_seen": st.sampled_from([True, False, "all", "non_padding", "no"]),
        "save_steps": stride,
        "save_total_limit": st.one_of(st.none(), st.integers(-1, 9)),
        "metric_for_best_model": st.sampled_from([None, "loss", "eval_accuracy"]),
        "greater_is_better": st.sampled_from([None, True, False]),
        "seed": st.integers(0, 2**63),
        "label_names": st.one_of(st.none(), st.lists(st.text(max_size=9), max_size=3)),
        "debug": st.sampled_from(["", None, []]),
        "report_to": st.sampled_from(["none", None, []]),
        "accelerator_config": st.sampled_from([None, {}, {"even_batches": False}, '{"non_blocking": true}']),
        "nonfinite_policy": st.sampled_from(["raise", "skip"]),
    }
    return st.fixed_dictionaries({}, optional=values)


@given(_settings())
def test_to_dict_gives_the_arguments_back(settings: dict[str, Any]) -> None:
    args = TrainingArguments(**settings)
    again = TrainingArguments(**json.loads(args.to_json_string()))
    assert again == args
    assert again.to_dict() == args.to_dict()


@dataclass
class FactoryArguments(TrainingArguments):
    """As scripts declare their defaults; two of the names are old ones."""

    output_dir: str | None = field(default_factory=lambda: "made")
    group_by_length: bool = field(default_factory=lambda: False)
    evaluation_strategy: str = field(default_factory=lambda: "epoch")
    label_names: list[str] | None = field(default_factory=lambda: ["labels"])
    save_steps: float = field(default_factory=lambda: 100)
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(default_factory=lambda: {"num_cycles": 2})
    push_to_hub: bool = field(default_factory=lambda: False)
    mine: bool = field(default_factory=lambda: True)


def test_a_factory_of_a_subclass_makes_the_default() -> None:
    parser = HfArgumentParser(FactoryArguments)
    (from_words,) = parser.parse_args_into_dataclasses([])
    (from_dict,) = parser.parse_dict({})
    for args in (FactoryArguments(), from_words, from_dict, copy.deepcopy(from_words)):
        assert (args.output_dir, args.save_steps, args.mine) == ("made", 100, True)
        assert (args.group_by_length, args.train_sampling_strategy) == (False, "random")
        assert args.evaluation_strategy == args.eval_strategy == "epoch"
        assert (args.label_names, args.lr_scheduler_kwargs) == (["labels"], {"num_cycles": 2})
    assert from_words.label_names is not from_dict.label_names


def test_words_replace_what_a_factory_made() -> None:
    words = ["--group_by_length", "--save_steps", "7", "--no_mine", "--evaluation_strategy", "no"]
    (args,) = HfArgumentParser(FactoryArguments).parse_args_into_dataclasses(words)
    assert (args.train_sampling_strategy, args.save_steps, args.mine) == ("group_by_length", 7, False)
    assert args.eval_strategy == "no"


def test_a_short_repr_lists_what_differs_from_the_defaults() -> None:
    args = TrainingArguments("out", learning_rate=1e-3, eval_strategy="steps", logging_steps=500)
    args.seed = 3
    assert (
        repr(args)
        == "TrainingArguments(output_dir='out', learning_rate=0.001, eval_strategy='steps', seed=3)"
    )
    assert repr(TrainingArguments()) == "TrainingArguments()"
    assert "\n  adam_beta1=0.9,\n" in str(args)

    class Own(TrainingArguments):
        def __init__(self, folder: str) -> None:
            super().__init__(folder, max_steps=3)

    assert repr(Own("out")) == "Own(output_dir='out', max_steps=3)"


def test_a_class_that_needs_a_value_in_its_own_code_has_defaults() -> None:
    """As that of ms-swift, with a mixin that needs none."""

    @dataclass
    class Mixin:
        mine: int = 1

        def __post_init__(self) -> None:
            self.output_dir = os.path.abspath(self.output_dir)

    @dataclass
    class Own(Mixin, TrainingArguments):
        def __post_init__(self) -> None:
            Mixin.__post_init__(self)
            TrainingArguments.__post_init__(self)

    changed = [
        name for name, _, is_default in describe(Own(output_dir="/out", max_steps=3)) if not is_default
    ]
    assert changed == ["output_dir", "max_steps", "mine"]


@pytest.mark.parametrize("kind", [TrainingArguments, SFTConfig, Seq2SeqTrainingArguments, ScriptArguments])
def test_signature_and_help_list_every_argument(kind: type[TrainingArguments]) -> None:
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    shown = inspect.signature(kind).parameters
    assert list(shown) == list(fields)
    assert shown["learning_rate"].annotation is float
    assert shown["learning_rate"].default == fields["learning_rate"].default
    assert shown["include_for_metrics"].default == []
    if kind is ScriptArguments:
        return
    text = pydoc.plain(pydoc.render_doc(kind))
    for name, spec in fields.items():
        (line,) = [line for line in text.splitlines() if line.strip(" |").startswith(f"{name} (")]
        # Not `spec.type`: parsers of other libraries, which earlier tests run, put the resolved type there.
        declared = next(
            c.__annotations__[name] for c in kind.__mro__ if name in vars(c).get("__annotations__", ())
        )
        assert declared in line
        assert line.endswith(".")
        assert spec.metadata["help"] in line
    assert "learning_rate: float = " in text
    assert text.index("Attributes:") < text.index("Raises:")


def test_names_of_the_layout_are_answered_with_the_object_that_has_them() -> None:
    axes = [f.name for f in dataclasses.fields(ParallelismConfig) if f.name.endswith("_size")]
    with pytest.raises(ConfigError) as caught:
        TrainingArguments("out", **dict.fromkeys(axes, 2), mixed_precision="bf16")
    for name in axes:
        assert f"{name}=2: is of the layout: pass parallelism_config=ParallelismConfig({name}=...)" in str(
            caught.value
        )
    assert "mixed_precision='bf16': is of Accelerator: pass bf16=True or fp16=True" in str(caught.value)
