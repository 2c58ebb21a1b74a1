"""Engines and number formats that scripts can request and Windlass does not have: each is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from windlass.config.parallel.rows_float8 import MS_AMP, TRANSFORMER_ENGINE
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


class MegatronLMPlugin(_Refused):
    """Megatron-LM's engine; refused."""

    reason = "Megatron-LM is not built; shard the model with FullyShardedDataParallelPlugin"


class TERecipeKwargs(_Refused):
    """Float8 with Transformer Engine; refused."""

    reason = f"{TRANSFORMER_ENGINE}, or AORecipeKwargs()"


class MSAMPRecipeKwargs(_Refused):
    """Float8 with MS-AMP; refused."""

    reason = f"{MS_AMP}, or AORecipeKwargs()"


class FP8RecipeKwargs(_Refused):
    """Options of Transformer Engine and MS-AMP, under their earlier name; refused."""

    reason = "has options of Transformer Engine and MS-AMP, which are not built; use AORecipeKwargs() for torchao's"


class BnbQuantizationConfig(_Refused):
    """Loading weights in four or eight bits; refused."""

    reason = "quantised loading is not built; load the model in bf16"
