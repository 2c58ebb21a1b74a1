"""The plugin of DeepSpeed, and those of engines and number formats that are refused, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from windlass.config.deepspeed import AUTO, for_frozen, stage_of, value_at
from windlass.config.loop_options import Plugin
from windlass.config.parallel.rows_compute import MS_AMP, TRANSFORMER_ENGINE
from windlass.config.parallel.rows_deepspeed import CONFIG, FIELDS, config_of
from windlass.config.parallel.table import SECTIONS
from windlass.config.plan import ZeroPlan
from windlass.config.sections.setting import described
from windlass.core.errors import ConfigError, Problem

_NOT_SETTINGS = ("hf_ds_config", "is_train_batch_min", "enable_msamp", "msamp_opt_level")


@described(SECTIONS["deepspeed_config"])
@dataclass
class DeepSpeedPlugin(Plugin):
    """DeepSpeed's ZeRO.

    Attributes:
        hf_ds_config: a DeepSpeed configuration, as a dict or a file.
        is_train_batch_min: no effect: an engine does not need to know the batch size.
        enable_msamp, msamp_opt_level: refused: eight-bit training is not built.
    """

    argument = "deepspeed_plugin"

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
        for name in ("enable_msamp", "msamp_opt_level"):
            if getattr(self, name):
                yield Problem(f"DeepSpeedPlugin.{name}", getattr(self, name), MS_AMP)

    def settings(self) -> dict[str, Any]:
        """What was set, under the names of a launch file."""
        whole = getattr(self.hf_ds_config, "config", self.hf_ds_config)  # of an HfDeepSpeedConfig
        names = [field.name for field in fields(self) if field.name not in _NOT_SETTINGS]
        said = {name: value for name in names if (value := getattr(self, name)) is not None}
        return said if whole is None else {**said, "deepspeed_config_file": whole}

    # --- what scripts ask of it ---------------------------------------------------------------------------------------

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the precision in `deepspeed_config`. The trained model is not changed.

        Args:
            mixed_precision: "no", "fp16" or "bf16".
        """
        # Not a field: it is not among the settings of the run.
        self.__dict__["_compute"] = mixed_precision

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration of an engine for a further model, which is not trained: without "auto", an optimizer and a
        schedule. A new dict each time: changes of it do not change the engine of the trained model.
        """
        return for_frozen(self._whole(), self.__dict__.get("_compute", "no"))

    @property
    def selected(self) -> bool:
        """True: a plugin that an accelerator shows is the one that it uses."""
        return True

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value at a path of the configuration, "auto" as it is.

        Args:
            ds_key_long: keys joined by dots, such as "zero_optimization.stage".
            default: returned if the path does not exist.
        """
        return value_at(self._whole(), ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return True if the run decides the value at a path: it is "auto". `ds_key_long` as in `get_value`."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_zero3_init_enabled(self) -> bool:
        """Return True if models of transformers are divided while they are built."""
        return stage_of(self._whole()) == 3 and self.zero3_init_flag is not False

    def _whole(self) -> dict[str, Any]:
        said = self.settings()
        given = said.get("deepspeed_config_file")
        if given is not None:
            return dict(CONFIG.read_for("DeepSpeedPlugin.hf_ds_config", given))
        keys = {word: key for key in FIELDS for word in key.words}
        return config_of(
            {
                keys[word].name: keys[word].read_for(f"DeepSpeedPlugin.{word}", value)
                for word, value in said.items()
                if word in keys
            }
        )


def plugin_of(plan: ZeroPlan, compute: str) -> DeepSpeedPlugin:
    """The plugin that says what `plan` does, for scripts that read it."""

    def value(path: str, default: Any = None) -> Any:
        found = value_at(plan.config, path, default)
        return default if found == AUTO else found

    made = DeepSpeedPlugin(
        hf_ds_config=plan.config,
        gradient_accumulation_steps=value("gradient_accumulation_steps"),
        gradient_clipping=value("gradient_clipping"),
        zero_stage=stage_of(plan.config),
        offload_optimizer_device=value("zero_optimization.offload_optimizer.device", "none"),
        offload_param_device=value("zero_optimization.offload_param.device", "none"),
        offload_optimizer_nvme_path=value("zero_optimization.offload_optimizer.nvme_path"),
        offload_param_nvme_path=value("zero_optimization.offload_param.nvme_path"),
        zero3_init_flag=plan.divides_new,
        zero3_save_16bit_model=value("zero_optimization.stage3_gather_16bit_weights_on_model_save", False),
    )
    made.set_mixed_precision(compute)
    return made


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

    reason = "quantised loading of other models is not built; use from_pretrained(quantization_config=...)"
