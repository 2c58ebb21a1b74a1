"""Engines and number formats that scripts can request and Windlass does not have: each is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from windlass.config.support_rows import ACCELERATOR_REFUSED
from windlass.core.errors import ConfigError, Problem


@dataclass
class DeepSpeedPlugin:
    """DeepSpeed's ZeRO. The object can be made; using it is refused.

    Attributes:
        hf_ds_config: a DeepSpeed configuration, as a dict or a file.
        gradient_accumulation_steps, gradient_clipping: as in `TrainingArguments`.
        zero_stage: 0 to 3.
        is_train_batch_min: which loader decides the batch size.
        offload_optimizer_device, offload_param_device: "none", "cpu" or "nvme".
        offload_optimizer_nvme_path, offload_param_nvme_path: folders for "nvme".
        zero3_init_flag, zero3_save_16bit_model: how models of stage 3 are made and saved.
        transformer_moe_cls_names: classes of expert layers.
        enable_msamp, msamp_opt_level: eight-bit training.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: Literal["O1", "O2"] | None = None

    def objections(self) -> Iterator[Problem]:
        """Refuse any use."""
        given = f"DeepSpeedPlugin(zero_stage={self.zero_stage})"
        yield Problem("deepspeed_plugin", given, ACCELERATOR_REFUSED["deepspeed_plugin"])


class _Refused:
    """A configuration object that cannot be made."""

    reason = ""

    def __init__(self, *values: Any, **options: Any) -> None:
        given = ", ".join([*map(repr, values), *(f"{key}={value!r}" for key, value in options.items())])
        raise ConfigError(Problem(type(self).__name__, f"({given})", self.reason))


class _EightBits(_Refused):
    reason = "eight-bit training is not built; use mixed_precision='bf16'"


class MegatronLMPlugin(_Refused):
    """Megatron-LM's engine; refused."""

    reason = "Megatron-LM is not built; shard the model with FullyShardedDataParallelPlugin"


class TERecipeKwargs(_EightBits):
    """Eight-bit training with Transformer Engine; refused."""


class MSAMPRecipeKwargs(_EightBits):
    """Eight-bit training with MS-AMP; refused."""


class AORecipeKwargs(_EightBits):
    """Eight-bit training with torchao; refused."""


class FP8RecipeKwargs(_EightBits):
    """Eight-bit training, under its earlier name; refused."""


class BnbQuantizationConfig(_Refused):
    """Loading weights in four or eight bits; refused."""

    reason = "quantised loading is not built; load the model in bf16"
