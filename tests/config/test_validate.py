"""What is wrong with arguments is found, all of it at once, each with field, value and fix; what is fine passes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.config.arguments import TrainingArguments
from windlass.config.sections.setting import rules_of
from windlass.config.validate import problems
from windlass.core.errors import ConfigError

# field(s) -> the fields that are then named as wrong
WRONG: list[tuple[dict[str, Any], set[str]]] = [
    ({"per_device_train_batch_size": 0}, {"per_device_train_batch_size"}),
    ({"per_device_train_batch_size": 1.5}, {"per_device_train_batch_size"}),
    ({"per_device_train_batch_size": True}, {"per_device_train_batch_size"}),
    ({"per_device_eval_batch_size": -1}, {"per_device_eval_batch_size"}),
    ({"num_train_epochs": "three"}, {"num_train_epochs"}),
    ({"num_train_epochs": float("nan")}, {"num_train_epochs"}),
    ({"num_train_epochs": 0}, {"num_train_epochs"}),
    ({"num_train_epochs": -1, "max_steps": 0}, {"num_train_epochs"}),
    ({"max_steps": -5}, {"max_steps"}),
    ({"max_steps": -5, "num_train_epochs": -3}, {"max_steps", "num_train_epochs"}),
    ({"max_steps": "many", "num_train_epochs": 0}, {"max_steps", "num_train_epochs"}),
    ({"learning_rate": -1e-5}, {"learning_rate"}),
    ({"learning_rate": "5e-5"}, {"learning_rate"}),
    ({"learning_rate": float("inf")}, {"learning_rate"}),
    ({"lr_scheduler_type": "cosinus"}, {"lr_scheduler_type"}),
    ({"lr_scheduler_kwargs": '{"a": '}, {"lr_scheduler_kwargs"}),
    ({"lr_scheduler_kwargs": "missing.json"}, {"lr_scheduler_kwargs"}),
    ({"lr_scheduler_kwargs": [1]}, {"lr_scheduler_kwargs"}),
    ({"warmup_steps": -1}, {"warmup_steps"}),
    ({"warmup_steps": 10.5}, {"warmup_steps"}),
    ({"optim": "adamw_hf"}, {"optim"}),
    ({"optim": "galore_adamw"}, {"optim_target_modules"}),
    ({"optim_target_modules": ["attn"]}, {"optim_target_modules"}),
    ({"optim_args": "rank"}, {"optim_args"}),
    ({"adam_beta1": 1.0}, {"adam_beta1"}),
    ({"adam_beta2": -0.1}, {"adam_beta2"}),
    ({"adam_epsilon": -1.0}, {"adam_epsilon"}),
    ({"weight_decay": -0.1}, {"weight_decay"}),
    ({"gradient_accumulation_steps": 0}, {"gradient_accumulation_steps"}),
    ({"max_grad_norm": -1}, {"max_grad_norm"}),
    ({"label_smoothing_factor": 1.0}, {"label_smoothing_factor"}),
    ({"fp16": True, "bf16": True}, {"fp16"}),
    ({"fp16_full_eval": True, "bf16_full_eval": True}, {"fp16_full_eval"}),
    ({"bf16": "yes"}, {"bf16"}),
    *(
        ({"activation_checkpointing_kwargs": {"every_n_layers": n}}, {"activation_checkpointing_kwargs.every_n_layers"})
        for n in (0, 1.5, True)
    ),
    ({"torch_compile_mode": "fast"}, {"torch_compile_mode"}),
    ({"seed": 2**64}, {"seed"}),
    ({"data_seed": 2**64}, {"data_seed"}),
    ({"num_train_epochs": float("inf")}, {"num_train_epochs"}),
    ({"max_save_failures": -1}, {"max_save_failures"}),
    ({"preemption_signals": "SIG_IGN"}, {"preemption_signals"}),
    ({"preemption_signals": "SIGTERM SIG_SETMASK"}, {"preemption_signals"}),
    ({"torch_empty_cache_steps": -1}, {"torch_empty_cache_steps"}),
    ({"logging_steps": 10.5}, {"logging_steps"}),
    ({"logging_steps": 0}, {"logging_steps"}),
    ({"logging_steps": -1}, {"logging_steps"}),
    ({"logging_strategy": "sometimes"}, {"logging_strategy"}),
    ({"logging_strategy": "best"}, {"logging_strategy"}),
    ({"eval_steps": 2.5}, {"eval_steps"}),
    ({"eval_strategy": "steps", "logging_strategy": "no", "logging_steps": 0}, {"eval_steps"}),
    ({"save_steps": 0}, {"save_steps"}),
    ({"save_steps": -1}, {"save_steps"}),
    ({"eval_strategy": "steps", "eval_steps": -1}, {"eval_steps"}),
    ({"eval_strategy": "epoch", "eval_steps": -2}, {"eval_steps"}),
    ({"eval_strategy": "steps", "logging_strategy": "no", "logging_steps": -1}, {"eval_steps"}),
    ({"warmup_steps": -1}, {"warmup_steps"}),
    ({"include_num_input_tokens_seen": "some"}, {"include_num_input_tokens_seen"}),
    ({"include_for_metrics": ["outputs"]}, {"include_for_metrics"}),
    ({"log_level": "loud"}, {"log_level"}),
    ({"log_level_replica": "quiet"}, {"log_level_replica"}),
    ({"report_to": ["wandb", "flyte"]}, {"report_to"}),
    ({"report_to": ["all", "flyte"]}, {"report_to"}),
    ({"report_to": "wandbb"}, {"report_to"}),
    ({"eval_delay": -1}, {"eval_delay"}),
    ({"eval_accumulation_steps": 0}, {"eval_accumulation_steps"}),
    ({"save_strategy": "best"}, {"save_strategy"}),
    ({"save_strategy": "best", "metric_for_best_model": "loss"}, {"save_strategy"}),
    ({"load_best_model_at_end": True}, {"load_best_model_at_end"}),
    ({"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "no"}, {"load_best_model_at_end"}),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {"lr_scheduler_type"}),
    ({"lr_scheduler_type": "greedy"}, {"lr_scheduler_type"}),
    ({"seed": -1}, {"seed"}),
    ({"dataloader_num_workers": -1}, {"dataloader_num_workers"}),
    ({"dataloader_prefetch_factor": 2}, {"dataloader_prefetch_factor"}),
    ({"dataloader_persistent_workers": True}, {"dataloader_persistent_workers"}),
    ({"dataloader_multiprocessing_context": "spawn"}, {"dataloader_multiprocessing_context"}),
    ({"label_names": [1]}, {"label_names"}),
    ({"train_sampling_strategy": "sorted"}, {"train_sampling_strategy"}),
    ({"ddp_timeout": 0}, {"ddp_timeout"}),
    ({"ddp_bucket_cap_mb": 0}, {"ddp_bucket_cap_mb"}),
    ({"debug": 3}, {"debug"}),
    ({"local_rank": 3}, {"local_rank"}),
    ({"nonfinite_policy": "ignore"}, {"nonfinite_policy"}),
    ({"nonfinite_policy": "rollback", "save_strategy": "no"}, {"nonfinite_policy"}),
    ({"accelerator_config": {"split_batch": True}}, {"accelerator_config"}),
    ({"accelerator_config": TrainingArguments}, {"accelerator_config"}),
    ({"output_dir": 3}, {"output_dir"}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "fields"), WRONG, ids=lambda x: str(sorted(x))[:60])
def test_is_refused_by_field(
    settings: dict[str, Any], fields: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out" if "output_dir" not in settings else settings.pop("output_dir"), **settings)
    assert {p.field for p in error.value.problems} == fields
    assert all(p.fix and p.field in str(error.value) for p in error.value.problems)


FINE: list[dict[str, Any]] = [
    {"num_train_epochs": -1, "max_steps": 3},
    {"num_train_epochs": 2},
    {"warmup_steps": 0.5},
    {"warmup_steps": 100.0},
    {"logging_steps": 0.01, "save_steps": 1, "eval_steps": 1.0},
    {"logging_strategy": "no", "logging_steps": 0},
    {
        "logging_strategy": "no",
        "logging_steps": -1,
        "save_strategy": "epoch",
        "save_steps": -1.0,
        "eval_steps": -1,
    },
    {"logging_strategy": "epoch", "save_strategy": "epoch", "eval_strategy": "epoch"},
    {"save_strategy": "best", "metric_for_best_model": "accuracy", "eval_strategy": "epoch"},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 7},
    {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "steps"},
    {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"},
    {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True},
    {"max_grad_norm": 0, "label_smoothing_factor": 0.1},
    {"report_to": []},
    {"report_to": ["none"]},
    {"report_to": ["wandb", "mlflow"]},
    {"report_to": "all"},
    {"fsdp": "", "fsdp_config": {}, "deepspeed": None},
    {"fsdp": []},
    {"local_rank": 0},
    {"save_total_limit": 0},
    {"optim_args": "betas=0.9, eps=1e-6"},
    {"resume_from_checkpoint": True},
    {"debug": [], "run_name": "mine"},
    {"nonfinite_policy": "skip"},
    {"fp16": True, "bf16_full_eval": True},
]


@pytest.mark.parametrize("settings", FINE, ids=str)
def test_is_fine(settings: dict[str, Any]) -> None:
    args = TrainingArguments("out", **settings)
    assert problems(args) == []


_NOT_NEUTRAL: dict[str, Any] = {
    "torch_empty_cache_steps": 5, "skip_memory_metrics": False, "debug": "underflow_overflow",
    "liger_kernel_config": {"rope": True}, "neftune_noise_alpha": 5.0,
    "project": "mine", "deepspeed": {"zero_optimization": {"stage": 2}},
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n, rules in rules_of(TrainingArguments).items() if rules.refused])
def test_what_is_not_built_is_refused_when_set(name: str) -> None:
    field = next(f for f in dataclasses.fields(TrainingArguments) if f.name == name)
    value = _NOT_NEUTRAL.get(name, True if field.default is False or "bool" in str(field.type) else "x")
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", **{name: value})
    assert [p.field for p in error.value.problems] == [name]
    assert "built" in error.value.problems[0].fix
    assert TrainingArguments("out", **{name: field.default}) == TrainingArguments("out")


# Fields that are only wrong together with others, whose rule waits while one of those is wrong by itself.
_TOGETHER = {
    "num_train_epochs", "save_strategy", "load_best_model_at_end", "lr_scheduler_type", "logging_strategy",
    "logging_steps", "save_steps", "report_to", "optim", "dataloader_prefetch_factor",
    "dataloader_persistent_workers", "dataloader_multiprocessing_context", "output_dir",
}  # fmt: skip
_ALONE = [case for case, _ in WRONG if len(case) == 1 and _TOGETHER.isdisjoint(case)]


@given(st.lists(st.sampled_from(_ALONE), min_size=1, max_size=20))
def test_all_problems_come_at_once(wrong: list[dict[str, Any]]) -> None:
    settings = {name: value for case in wrong for name, value in case.items()}
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", **settings)
    assert {p.field.split(".")[0] for p in error.value.problems} == set(settings)


def test_dicts_may_be_json_text_or_files(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"power": 2.0}))
    for value in ({"power": 2.0}, '{"power": 2.0}', '{"power": "2.0"}', str(path), path):
        assert TrainingArguments("out", lr_scheduler_kwargs=value).lr_scheduler_kwargs == {"power": 2.0}
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="not an object"):
        TrainingArguments("out", lr_scheduler_kwargs=path)


def test_numpy_numbers_are_numbers() -> None:
    import numpy as np

    args = TrainingArguments("out", learning_rate=np.float32(0.5), per_device_train_batch_size=np.int64(4))  # type: ignore[arg-type]
    assert (type(args.learning_rate), type(args.per_device_train_batch_size)) == (float, int)
    for value in (np.True_, np.False_):
        assert TrainingArguments("out", full_determinism=value).full_determinism is bool(value)  # type: ignore[arg-type]


def test_the_launchers_rank_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert TrainingArguments("out", local_rank=3).local_rank == 3
    with pytest.raises(ConfigError, match="disagrees"):
        TrainingArguments("out", local_rank=2)


def test_choices_are_listed_and_guessed() -> None:
    with pytest.raises(ConfigError, match=r"inverse_sqrt.*did you mean 'cosine'"):
        TrainingArguments("out", lr_scheduler_type="cosin")


@pytest.mark.parametrize(
    ("habit", "name"),
    [("batch_size", "per_device_train_batch_size"), ("lr", "learning_rate"), ("epochs", "num_train_epochs")],
)
def test_names_of_habit_are_answered_with_the_right_one(habit: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{habit}=1.*did you mean '{name}'"):
        TrainingArguments(**{habit: 1})


def test_what_is_refused_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"trackio_static_space_id=.*trackio.freeze"):
        TrainingArguments(trackio_static_space_id="a/b")
