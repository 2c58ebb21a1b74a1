"""Names of earlier versions: accepted with one warning, meaning what they meant, contradicting nothing in silence."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.config.accepting import OLD_NAMES
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import ConfigError

# old name -> (a value, the field it sets, the value that field then has)
CARRIED: dict[str, tuple[Any, str, Any]] = {
    "evaluation_strategy": ("epoch", "eval_strategy", "epoch"),
    "warmup_ratio": (0.1, "warmup_steps", 0.1),
    "group_by_length": (True, "train_sampling_strategy", "group_by_length"),
    "no_cuda": (True, "use_cpu", True),
    "adafactor": (True, "optim", "adafactor"),
    "torchdynamo": ("eager", "torch_compile_backend", "eager"),
    "include_tokens_per_second": (True, "include_num_input_tokens_seen", "all"),
    "include_inputs_for_metrics": (True, "include_for_metrics", ["inputs"]),
    "per_gpu_train_batch_size": (3, "per_device_train_batch_size", 3),
    "per_gpu_eval_batch_size": (5, "per_device_eval_batch_size", 5),
    "push_to_hub_token": ("t", "hub_token", "t"),
    "push_to_hub_model_id": ("m", "hub_model_id", "m"),
    "push_to_hub_organization": ("o", "hub_model_id", "o/out"),
    "xpu_backend": ("gloo", "ddp_backend", "gloo"),
    "fsdp_min_num_params": (100, "fsdp_config", {"min_num_params": 100}),
    "fsdp_transformer_layer_cls_to_wrap": (
        "Block",
        "fsdp_config",
        {"transformer_layer_cls_to_wrap": "Block"},
    ),
}
# What adds to its new field, and so never contradicts it.
MERGED = ("include_inputs_for_metrics", "push_to_hub_organization")
# old name -> a value, and the new field whose refusal it then meets, because that feature is not built
CARRIED_TO_REFUSED: dict[str, tuple[Any, str]] = {
    "tpu_metrics_debug": (True, "debug"),
}
# what is an option of accelerator_config now
OF_LOADERS = ("split_batches", "dispatch_batches")
# old name -> a value that is accepted and changes nothing
WITHOUT_EFFECT: dict[str, Any] = {
    "logging_dir": "logs",
    "overwrite_output_dir": True,
    "use_mps_device": True,
    "fp16_opt_level": "O2",
    "fp16_backend": "apex",
    "half_precision_backend": "cuda_amp",
    "save_safetensors": False,
}
REFUSED: dict[str, Any] = {
    "jit_mode_eval": True,
    "use_ipex": True,
    "past_index": 2,
    "mp_parameters": "x",
    "_n_gpu": 4,
    "use_legacy_prediction_loop": True,
    "tpu_num_cores": 8,
    "ray_scope": "all",
}


def test_every_old_name_is_tested_here() -> None:
    assert {*CARRIED, *CARRIED_TO_REFUSED, *OF_LOADERS, *WITHOUT_EFFECT, *REFUSED} == set(OLD_NAMES)


@pytest.mark.parametrize("name", CARRIED)
def test_is_taken_as_the_new_name_with_one_warning(name: str, said: list[str]) -> None:
    value, field, expected = CARRIED[name]
    for _ in range(2):
        args = TrainingArguments("out", **{name: value})
    assert getattr(args, field) == expected
    assert getattr(args, name) == value
    assert len([m for m in said if repr(name) in m and repr(field) in m]) == 1


@pytest.mark.parametrize("name", CARRIED)
def test_may_be_assigned_later(name: str) -> None:
    value, field, expected = CARRIED[name]
    args = TrainingArguments("out")
    setattr(args, name, value)
    assert getattr(args, field) == expected
    assert name not in args.to_dict()


@pytest.mark.parametrize("name", [n for n, old in OLD_NAMES.items() if n not in WITHOUT_EFFECT])
def test_at_its_old_default_it_changes_nothing(name: str) -> None:
    assert TrainingArguments("out", **{name: OLD_NAMES[name].default}) == TrainingArguments("out")


@pytest.mark.parametrize(
    ("given", "name", "value", "kept"),
    [
        ({"optim": "sgd"}, "adafactor", False, {"optim": "sgd"}),
        ({"optim": "adafactor"}, "adafactor", False, {"optim": "adamw_torch_fused"}),
        (
            {"train_sampling_strategy": "sequential"},
            "group_by_length",
            False,
            {"train_sampling_strategy": "sequential"},
        ),
        ({"include_for_metrics": ["loss"]}, "include_inputs_for_metrics", False, {"include_for_metrics": ["loss"]}),
        (
            {"include_for_metrics": ["loss", "inputs"]},
            "include_inputs_for_metrics",
            False,
            {"include_for_metrics": ["loss"]},
        ),
        ({"debug": "underflow_overflow"}, "tpu_metrics_debug", False, {"debug": ["underflow_overflow"]}),
        ({"warmup_steps": 0.1}, "warmup_ratio", 0.0, {"warmup_steps": 0.0}),
        ({"warmup_steps": 100}, "warmup_ratio", 0.0, {"warmup_steps": 100}),
        (
            {"fsdp": True, "fsdp_config": {"min_num_params": 7, "cpu_offload": True}},
            "fsdp_min_num_params",
            0,
            {"fsdp_config": {"min_num_params": 0, "cpu_offload": True}},
        ),
        ({"per_device_train_batch_size": 4}, "per_gpu_train_batch_size", None, {"per_device_train_batch_size": 4}),
    ],
)  # fmt: skip
def test_its_old_default_assigned_later_ends_what_it_requested_and_nothing_else(
    given: dict[str, Any], name: str, value: Any, kept: dict[str, Any]
) -> None:
    args = TrainingArguments("out", **given)
    setattr(args, name, value)
    assert {field: getattr(args, field) for field in kept} == kept


@pytest.mark.parametrize("ratio", [1.0, 5, -0.5])
def test_a_ratio_that_is_no_share_cannot_be_assigned(ratio: float) -> None:
    args = TrainingArguments("out")
    with pytest.raises(ConfigError, match="share of all updates"):
        args.warmup_ratio = ratio  # type: ignore[attr-defined]
    assert args.warmup_steps == 0


@pytest.mark.parametrize("name", CARRIED_TO_REFUSED)
def test_leads_to_the_refusal_of_the_new_name(name: str) -> None:
    value, field = CARRIED_TO_REFUSED[name]
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", **{name: value})
    assert field in [p.field for p in error.value.problems]


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_is_accepted_and_said_to_do_nothing(name: str, said: list[str]) -> None:
    args = TrainingArguments("out", **{name: WITHOUT_EFFECT[name]})
    assert args == TrainingArguments("out")
    assert getattr(args, name) == WITHOUT_EFFECT[name]
    assert len([m for m in said if repr(name) in m]) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", **{name: REFUSED[name]})
    assert [p.field for p in error.value.problems] == [name]
    args = TrainingArguments("out")
    with pytest.raises(ConfigError):
        setattr(args, name, REFUSED[name])


@pytest.mark.parametrize("name", [n for n in CARRIED if n not in MERGED])
def test_a_contradiction_is_a_problem(name: str) -> None:
    value, field, _ = CARRIED[name]
    others = {
        "eval_strategy": "steps",
        "optim": "sgd",
        "ddp_backend": "nccl",
        "train_sampling_strategy": "sequential",
        "fsdp_config": {"min_num_params": 5, "transformer_layer_cls_to_wrap": "Other"},
    }
    other = others.get(field, {str: "non_padding", bool: False, int: 77, float: 0.5}[type(value)])
    if field == "include_num_input_tokens_seen":
        other = "non_padding"
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", **{name: value, field: other})
    assert [p.field for p in error.value.problems] == [name]
    assert "contradicts" in str(error.value)


def test_both_names_with_one_meaning_are_fine() -> None:
    assert (
        TrainingArguments("out", evaluation_strategy="epoch", eval_strategy="epoch").eval_strategy == "epoch"
    )
    args = TrainingArguments("out", include_inputs_for_metrics=True, include_for_metrics=["loss"])
    assert args.include_for_metrics == ["loss", "inputs"]


@pytest.mark.parametrize("ratio", [1, 1.5, -0.1])
def test_a_ratio_is_a_share(ratio: float) -> None:
    with pytest.raises(ConfigError, match="share of all updates"):
        TrainingArguments("out", warmup_ratio=ratio)


def test_a_switch_is_on_only_where_it_says_so() -> None:
    for off in (0, "no", "False"):
        args = TrainingArguments("o", adafactor=off, group_by_length=off)
        assert (args.optim, args.train_sampling_strategy) == ("adamw_torch_fused", "random")
    args.adafactor = "yes"
    assert args.optim == "adafactor"
    args.adafactor = 0
    assert args.optim == "adamw_torch_fused"
    with pytest.raises(ConfigError, match="adafactor='perhaps': must be true or false"):
        TrainingArguments("o", adafactor="perhaps")


def test_problems_of_old_and_new_names_come_together() -> None:
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", past_index=3, learning_rat=1, evaluation_strategy="sometimes", seed=-1)
    assert {p.field for p in error.value.problems} == {"past_index", "learning_rat", "eval_strategy", "seed"}


def test_the_nan_filter_says_once_that_it_does_not_filter(said: list[str]) -> None:
    TrainingArguments("out")
    TrainingArguments("out", logging_nan_inf_filter=False)
    assert not said
    for _ in range(2):
        TrainingArguments("out", logging_nan_inf_filter=True)
    assert len([m for m in said if "logging_nan_inf_filter" in m]) == 1
    said.clear()
    TrainingArguments(**TrainingArguments("out").to_dict())
    assert not said


def test_unknown_names_are_attribute_errors() -> None:
    args = TrainingArguments("out")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = args.nothing
    assert not hasattr(args, "__deepcopy__")


def test_a_warning_about_an_argument_is_one_of_python_at_the_line_of_the_script(
    said: list[str],
) -> None:
    with pytest.warns(UserWarning, match="'evaluation_strategy' is now 'eval_strategy'") as issued:
        TrainingArguments("out", evaluation_strategy="epoch")
    assert [warning.filename for warning in issued] == [__file__]


@pytest.mark.parametrize("name", OF_LOADERS)
def test_options_of_loaders_go_into_their_group(name: str) -> None:
    args = TrainingArguments("out", **{name: True})
    assert getattr(args.accelerator_config, name) is True
