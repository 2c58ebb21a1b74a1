"""The arguments of an `SFTTrainer` from whatever a script passes."""

from __future__ import annotations

from typing import Any

from windlass.core.errors import Problem, did_you_mean, refuse
from windlass.core.logs import warn_of_argument
from windlass.finetuning.sft_config import SFTConfig
from windlass.finetuning.tuning_arguments import begin_tuning

# Keywords that the constructor of earlier versions of TRL took -> the fields of `SFTConfig` that replaced them.
_EARLIER = {
    **SFTConfig.EARLIER_NAMES,
    **{
        name: name
        for name in (
            "dataset_text_field",
            "packing",
            "eval_packing",
            "dataset_num_proc",
            "dataset_kwargs",
            "model_init_kwargs",
            "neftune_noise_alpha",
        )
    },
}


def sft_arguments(args: object, model: Any, train_dataset: Any, earlier: dict[str, Any]) -> SFTConfig:
    """Return the arguments as `SFTConfig`, after a check of the training dataset.

    Args:
        args: an `SFTConfig`; a `TrainingArguments`, whose values are kept; or None: the defaults, with an output folder
            named after the model.
        earlier: keywords of the constructor in earlier versions, which replace values of `args`.

    Raises:
        ConfigError: another type, or an unknown keyword.
    """
    return begin_tuning(SFTConfig, args, model, train_dataset, _checked(earlier))


def _checked(earlier: dict[str, Any]) -> dict[str, Any]:
    refuse(
        Problem(
            name, type(value).__name__, f"SFTTrainer has no such argument{did_you_mean(name, list(_EARLIER))}"
        )
        for name, value in earlier.items()
        if name not in _EARLIER
    )
    if earlier:
        fields = ", ".join(f"{_EARLIER[name]}={value!r}" for name, value in earlier.items())
        warn_of_argument(f"arguments of SFTTrainer that are now in SFTConfig: use SFTConfig({fields})")
    return {_EARLIER[name]: value for name, value in earlier.items()}
