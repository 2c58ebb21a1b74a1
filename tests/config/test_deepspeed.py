from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.small import arguments

from windlass.assemble.resolve import resolve_call, resolve_run
from windlass.assemble.rules import Facts
from windlass.config.deepspeed import (
    KEYS,
    SECTION_KEYS,
    RunValues,
    completed,
    for_engine,
    for_frozen,
    value_at,
    without_effect,
)
from windlass.config.plan import RunPlan
from windlass.core.errors import ConfigError
from windlass.core.world import World

# The configuration in transformers' documentation, with every "auto" of it.
DOCUMENTED: dict[str, Any] = {
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


_SCALING = DOCUMENTED["fp16"]
_ZERO_2 = {
    "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True,
    "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True, "round_robin_gradients": True,
}  # fmt: skip
# Further configurations of the documentation of transformers and of accelerate, and the arguments that go with them.
EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "transformers, stage 1": ({"zero_optimization": {"stage": 1}}, {}),
    "transformers, stage 2": (
        {"zero_optimization": {**_ZERO_2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}, {},
    ),
    "transformers, precision": (
        {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "communication_data_type": "fp32"},
        {"bf16": True},
    ),
    "transformers, loss scale": ({"zero_optimization": {"stage": 2}, "fp16": _SCALING}, {"fp16": True}),
    "transformers, optimizer": (
        {
            "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "Adam", "params": {
                "lr": 0.05, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "adam_w_mode": True,
            }},
        },
        {"learning_rate": 0.05, "weight_decay": 0.01},
    ),
    "accelerate, stage 2": (
        {
            "fp16": {**_SCALING, "enabled": True},
            "optimizer": {"type": "AdamW", "params": {
                "lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True,
            }},
            "scheduler": DOCUMENTED["scheduler"],
            "zero_optimization": {**_ZERO_2, "allgather_bucket_size": 2e8, "reduce_bucket_size": "auto"},
            "gradient_accumulation_steps": 1, "gradient_clipping": "auto", "steps_per_print": 2000,
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
        },
        {"fp16": True, "warmup_steps": 1},
    ),
    "accelerate, stage 3": (
        {
            **DOCUMENTED,
            "fp16": {**_SCALING, "enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                **DOCUMENTED["zero_optimization"],
                "stage3_gather_16bit_weights_on_model_save": "auto",
            },
        },
        {"fp16": True, "warmup_steps": 1},
    ),
}  # fmt: skip


_ZERO: dict[str, Any] = {"zero_optimization": {"stage": 1}}
# Keys of sections, of which DeepSpeed reads some for nothing.
MISSPELLED: list[tuple[dict[str, Any], str]] = [
    ({**_ZERO, "scheduler": {"type": "WarmupLR", "param": {"warmup_num_steps": 3}}}, "did you mean 'params'"),
    ({**_ZERO, "optimizer": {"type": "AdamW", "parms": {"lr": 0.1}}}, "did you mean 'params'"),
    ({**_ZERO, "optimizer": "AdamW"}, "deepspeed.optimizer='AdamW': must be a section"),
    ({**_ZERO, "bf16": {"enable": True}}, "did you mean 'enabled'"),
    ({**_ZERO, "bf16": True}, "deepspeed.bf16=True: must be a section"),
    ({**_ZERO, "fp16": {"initial_scale_pwr": 4}}, "did you mean 'initial_scale_power'"),
    ({**_ZERO, "aio": {"blok_size": 4096}}, "did you mean 'block_size'"),
    ({**_ZERO, "activation_checkpointing": {"cpu_checkpoint": True}}, "did you mean 'cpu_checkpointing'"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"pin": True}}}, "offload_optimizer.pin=True"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "offload_optimizer='cpu': must be"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}, "must be none, cpu or nvme"),
]


def plan(folder: Path, config: Any, width: int | None = None, **changes: Any) -> RunPlan:
    args = arguments(folder, deepspeed=config, **changes)
    return resolve_run(args, resolve_call(args, World(0, 2, 0, 2)), Facts(10, hidden_size=width))


def refusal(folder: Path, config: Any, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(folder, config, **changes)
    return str(caught.value)


@pytest.mark.parametrize("width", [None, 16])
def test_the_documented_file_is_completed(width: int | None, tmp_path: Path) -> None:
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps(DOCUMENTED))
    zero = plan(tmp_path, str(path), width, warmup_steps=1).dist.zero
    assert zero is not None
    assert "auto" not in json.dumps(zero.config)
    assert zero.config["gradient_accumulation_steps"] == 1, "the run accumulates"
    assert zero.config["zero_optimization"].get("reduce_bucket_size") == (None if width is None else 256)
    assert not {"optimizer", "scheduler", "fp16"} & zero.config.keys()


def test_the_sections_of_the_optimizer_and_the_schedule_take_the_arguments() -> None:
    values = {
        "optimizer.params.lr": (0.1, "learning_rate"),
        "scheduler.params.warmup_num_steps": (3, "warmup_steps"),
    }
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_min_lr": "auto"}},
    }
    filled, problems = completed(config, "it", RunValues(values))
    assert not problems
    assert filled["optimizer"]["params"] == {"lr": 0.1}
    assert filled["scheduler"]["params"] == {"warmup_num_steps": 3, "warmup_min_lr": 0}
    assert config["optimizer"]["params"] == {"lr": "auto"}, "what was given stays as it is"


def test_a_schedule_of_deepspeed_without_a_warmup_is_refused_with_the_argument(tmp_path: Path) -> None:
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}
    text = refusal(tmp_path, {"zero_optimization": {"stage": 1}, "scheduler": section})
    assert "scheduler.params.warmup_num_steps=0" in text
    assert "set warmup_steps" in text


def test_a_file_and_arguments_that_contradict_are_both_named(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.3}},
    }
    text = refusal(tmp_path, config, learning_rate=0.1)
    assert "TrainingArguments.deepspeed.optimizer.params.lr" in text
    assert "0.3" in text
    assert "learning_rate=0.1" in text
    assert "train_micro_batch_size_per_gpu=8" in text
    assert "per_device_train_batch_size=4" in text


def test_the_files_norm_comes_before_the_default(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.7}
    assert plan(tmp_path, config).stability.max_grad_norm == 0.7
    assert "max_grad_norm=0.5" in refusal(tmp_path, config, max_grad_norm=0.5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimisation": {"stage": 2}}, "did you mean 'zero_optimization'"),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "did you mean 'overlap_comm'"),
        ({"zero_optimization": {"stage": 4}}, "must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "auto"}}, "must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": None, "offload_param": {"device": "nvme"}}}, "must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "2", "offload_param": {"device": "nvme"}}}, "must be 0, 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "needs nvme_path",
        ),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "needs nvme_path"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "x"}}},
            "keeps tensors in files at stage 3 alone",
        ),
        ({"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}, "fp16"),
        ({"zero_optimization": {"stage": 1}, "elasticity": {"enabled": True}}, "elasticity"),
        ({"zero_optimization": {"stage": 1}, "optimizer": {"type": "OneBitAdam"}}, "must be AdamW or Adam"),
        (
            {
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "Adam", "params": {"adam_w_mode": False}},
            },
            "decay",
        ),
        (
            {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"amsgrad": True}}},
            "optim_args",
        ),
        ({"zero_optimization": {"stage": 1}, "tensorboard": {"enabled": True}}, "report_to"),
        ({"zero_optimization": {"stage": 1}, "scheduler": {"type": "Cosine"}}, "WarmupLR"),
        ({"zero_optimization": {"stage": 1}, "communication_data_type": "auto"}, 'no value for "auto"'),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            "DeepSpeedCPUAdam",
        ),
        (
            {"zero_optimization": {"stage": 1}, "bf16": {"bf16_master_weights_and_grads": True}},
            "DeepSpeedCPUAdam",
        ),
        ({"zero_optimization": {"stage": 2}, "prescale_gradients": True}, '"reduce_scatter": false'),
        ({"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2.0}, '"reduce_scatter": false'),
        *MISSPELLED,
    ],
)
def test_what_is_unknown_or_not_built_is_named(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fsdp": True}, "contradicts"),
        ({"learning_rate": 0.1, "optim": "sgd"}, "contradicts optim='sgd'"),
    ],
)
def test_arguments_that_do_not_go_with_it(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    assert words in refusal(tmp_path, config, **changes)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_precision_of_the_arguments_is_the_engines(precision: str, tmp_path: Path) -> None:
    zero = plan(tmp_path, {"zero_optimization": {"stage": 2}}, **{precision: True}).dist.zero
    assert zero is not None
    assert zero.config[precision] == {"enabled": True}


def test_sizes_of_a_file_are_not_compared_while_they_are_found(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8}
    assert "per_device_train_batch_size=4" in refusal(tmp_path, config)
    zero = plan(tmp_path, config, auto_find_batch_size=True).dist.zero
    assert zero is not None
    assert zero.config["train_micro_batch_size_per_gpu"] == 4


def test_every_refused_key_has_a_reason_and_a_way_out() -> None:
    reasons = {**KEYS, **SECTION_KEYS}
    assert not [name for name, why in reasons.items() if "built" in why]
    assert all(";" in why or ":" in why for why in reasons.values() if why)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_examples_of_documentations_are_completed(name: str, tmp_path: Path) -> None:
    config, changes = EXAMPLES[name]
    zero = plan(tmp_path, config, width=16, **changes).dist.zero
    assert zero is not None
    assert "auto" not in json.dumps(zero.config)


def test_stage_0_is_plain_data_parallelism(tmp_path: Path) -> None:
    dist = plan(tmp_path, {"zero_optimization": {"stage": 0}}).dist
    assert (dist.strategy, dist.zero) == ("ddp", None)


def test_a_file_that_is_absent_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deepspeed.*absent\.json"):
        plan(tmp_path, str(tmp_path / "absent.json"))


def test_parameters_in_files_are_read_as_they_are_used() -> None:
    section = {"device": "nvme", "nvme_path": "/local/run1"}
    zero = {"stage": 3, "offload_param": section, "prefetch_bucket_size": 1000}
    found = for_engine({"zero_optimization": zero}, micro=1)["zero_optimization"]
    assert found == {
        "stage": 3,
        "offload_param": section,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    }
    (note,) = without_effect({"zero_optimization": zero}, "deepspeed")
    assert "stage3_prefetch_bucket_size" in note


def test_gradients_are_reduced_after_the_last_backward_at_stage_1() -> None:
    config = {"zero_optimization": {"stage": 1, "overlap_comm": True}}
    assert for_engine(config, micro=1)["zero_optimization"] == {"stage": 1}
    (note,) = without_effect(config, "deepspeed")
    assert "overlap_comm has no effect" in note


def test_activations_are_not_divided() -> None:
    (note,) = without_effect({"activation_checkpointing": {"partition_activations": True}}, "deepspeed")
    assert "partition_activations has no effect" in note


def test_each_further_model_has_a_folder_of_its_own() -> None:
    """DeepSpeed empties the folder of a model that it divides."""
    section = {"device": "nvme", "nvme_path": "/local/run1"}
    config = {"zero_optimization": {"stage": 3, "offload_param": section, "offload_optimizer": section}}
    first, second = (
        value_at(for_frozen(config, "fp32"), "zero_optimization.offload_param.nvme_path") for _ in range(2)
    )
    assert len({first, second, "/local/run1"}) == 3
    assert first.startswith("/local/run1/")
