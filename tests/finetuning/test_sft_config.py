"""The settings of fine-tuning have the names and defaults of TRL's."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest
from tests.finetuning.own_fields import own_fields

from windlass.config.arguments import TrainingArguments, shared_arguments
from windlass.config.sections.setting import default_of
from windlass.core.errors import ConfigError
from windlass.finetuning.dpo_config import DPOConfig
from windlass.finetuning.reward_config import RewardConfig
from windlass.finetuning.sft_config import AnswerSection, SFTConfig

OWN = own_fields(SFTConfig)


def test_names_and_defaults_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl")
    theirs = {f.name: f for f in dataclasses.fields(trl.SFTConfig)}
    own = set(vars(trl.SFTConfig)["__annotations__"]) | {"logging_steps", "gradient_checkpointing", "bf16"}
    answers = set(vars(AnswerSection)["__annotations__"])  # TRL generates none
    of_peft = {"loraplus_lr_ratio"}  # an optimizer of peft's, which TRL leaves to scripts
    assert set(OWN) - answers - of_peft == own
    for name in own:
        assert default_of(SFTConfig.__dataclass_fields__[name]) == theirs[name].default, name
    assert {"model_init_kwargs", "dataset_kwargs"} <= set(SFTConfig._VALID_DICT_FIELDS)


def test_the_arguments_of_the_constructor_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl")
    pytest.importorskip("datasets")
    from windlass import SFTTrainer

    ours, theirs = (list(inspect.signature(cls.__init__).parameters) for cls in (SFTTrainer, trl.SFTTrainer))
    assert ours[: len(theirs)] == theirs


def test_bfloat16_unless_float16() -> None:
    assert SFTConfig().bf16
    assert not SFTConfig(fp16=True).bf16
    assert SFTConfig().gradient_checkpointing
    assert SFTConfig().activation_checkpointing


@pytest.mark.parametrize(
    ("given", "read"), [("auto", None), ("none", None), ("Null", None), ("8", 8), (16, 16)]
)
def test_padding_is_read(given: object, read: object) -> None:
    assert SFTConfig(pad_to_multiple_of=given).pad_to_multiple_of == read


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("packing_strategy", "bfd-requeue", "bfd_split"), ("loss_type", "chunked_nll", "nll")],
)
def test_old_words_are_translated_with_a_warning(name: str, old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"is now '{new}'"):
        assert getattr(SFTConfig(**{name: old}), name) == new


def test_the_earlier_name_of_the_length_is_read() -> None:
    with pytest.warns(UserWarning, match="'max_seq_length' is now 'max_length'"):
        assert SFTConfig(max_seq_length=7).max_length == 7
    with pytest.raises(ConfigError, match="max_seq_length=7: contradicts max_length=8"):
        SFTConfig(max_seq_length=7, max_length=8)
    with pytest.raises(ConfigError, match="max_seq_length=7: there is no such argument"):
        TrainingArguments(max_seq_length=7)


def test_deprecated_settings_warn() -> None:
    with pytest.warns(FutureWarning, match="keep_end"):
        SFTConfig(truncation_mode="keep_end")
    with pytest.warns(FutureWarning, match="pad_token"):
        SFTConfig(pad_token="<pad>")


def test_json_is_read_and_wrong_values_are_listed_together() -> None:
    args = SFTConfig(dataset_kwargs='{"skip_prepare_dataset": true}', model_init_kwargs='{"dtype": "auto"}')
    assert args.skips_preparation
    assert args.model_init_kwargs == {"dtype": "auto"}
    with pytest.raises(ConfigError) as caught:
        SFTConfig(max_length=0, packing_strategy="best", loss_type="mse", learning_rate=-1)
    assert len(caught.value.problems) == 4
    for step in (0, -8, "-8", "8.0", "eight"):
        with pytest.raises(ConfigError, match=r"pad_to_multiple_of=.*: must be a whole number of at least 1"):
            SFTConfig(pad_to_multiple_of=step)
    for kind, name in (
        (SFTConfig, "router_aux_loss_coef"),
        (DPOConfig, "router_aux_loss_coef"),
        (RewardConfig, "center_rewards_coefficient"),
    ):
        with pytest.raises(ConfigError, match=f"{name}=nan: must be at least 0"):
            kind(**{name: math.nan})
    with pytest.raises(ConfigError, match="f_alpha_divergence_coef=nan: must be a finite number"):
        DPOConfig(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=math.nan)
    with pytest.raises(ConfigError, match=r"loss_weights=.*: must be finite numbers"):
        DPOConfig(loss_type=["sigmoid", "sft"], loss_weights=[math.nan, 1.0])


def test_what_follows_from_packing() -> None:
    assert SFTConfig(packing=True).joins_rows
    assert SFTConfig(packing=True).packs_evaluation
    assert not SFTConfig(packing=True, packing_strategy="wrapped").joins_rows
    assert not SFTConfig(packing=True, eval_packing=False).packs_evaluation


def test_ranks_compare_the_settings_of_fine_tuning() -> None:
    assert "packing" in shared_arguments(SFTConfig())
    assert "dataset_num_proc" not in shared_arguments(SFTConfig())
    assert "packing" not in shared_arguments(TrainingArguments())


def test_a_setting_of_a_plain_trainer_that_has_no_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="lean_loss=False: has no effect"):
        SFTConfig("out", lean_loss=False, use_cpu=True)
