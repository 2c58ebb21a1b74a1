"""Engines and number formats that scripts can request and Windlass does not have: each is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from windlass.core.errors import ConfigError, Problem


@dataclass
class DeepSpeedPlugin:
    """DeepSpeed's ZeRO.

    Attributes:
        hf_ds_config: a DeepSpeed configuration, as a dict or a file.
        gradient_accumulation_steps: micro-batches of an update.
        gradient_clipping: the global norm to which gradients are clipped.
        zero_stage: 0 to 3.
        is_train_batch_min: no effect: an engine does not need to know the batch size.
        offload_optimizer_device, offload_param_device: "none" or "cpu".
        offload_optimizer_nvme_path, offload_param_nvme_path: refused; they are not built.
        zero3_init_flag, zero3_save_16bit_model: no effect: see `docs/deepspeed.md`.
        transformer_moe_cls_names, enable_msamp, msamp_opt_level: refused; they are not built.
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
        """What is not built."""
        for name in ("transformer_moe_cls_names", "enable_msamp", "msamp_opt_level"):
            if getattr(self, name):
                yield Problem(
                    f"DeepSpeedPlugin.{name}", getattr(self, name), "is not built yet; leave it out"
                )

    def settings(self) -> dict[str, Any]:
        """What was set, under the names of a launch file."""
        whole = getattr(self.hf_ds_config, "config", self.hf_ds_config)  # of an HfDeepSpeedConfig
        names = (
            "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
            "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_init_flag",
            "zero3_save_16bit_model",
        )  # fmt: skip
        said = {name: value for name in names if (value := getattr(self, name)) is not None}
        return said if whole is None else {**said, "deepspeed_config_file": whole}


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
