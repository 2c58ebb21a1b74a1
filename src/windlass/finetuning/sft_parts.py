"""The parts of an `SFTTrainer`: those of any trainer that tunes a language model, and those of its data and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from windlass.config.arguments import TrainingArguments
from windlass.core.errors import Problem, did_you_mean, refuse
from windlass.core.logs import warn_of_argument
from windlass.data.collate_causal import DataCollatorForCausalLM
from windlass.finetuning.answering import check_answers
from windlass.finetuning.answers import EvaluationAnswers, open_answers
from windlass.finetuning.sft_checks import check_settings, router_coefficient
from windlass.finetuning.sft_config import SFTConfig
from windlass.finetuning.sft_data import SFTData, holds_images
from windlass.finetuning.sft_images import open_images
from windlass.finetuning.tuned_model import open_tuned_model
from windlass.finetuning.tuning_arguments import begin_tuning
from windlass.text.image_rows import ImageCollator
from windlass.transforms.model_limits import ModelLimits

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


@dataclass(frozen=True, slots=True)
class SFTParts:
    """What a trainer is made of."""

    args: SFTConfig  # the settings
    model: nn.Module  # with its adapter, if one is trained
    processing_class: Any  # tokenizer, or a processor with one
    collator: Callable[[list[Any]], Any]  # list of samples -> batch
    data: SFTData  # prepares datasets
    router_weight: float  # of the load-balancing loss of experts; 0 if there are none
    answers: EvaluationAnswers  # what evaluations generate


@dataclass(frozen=True, slots=True)
class Given:
    """What a script passes to the constructor; see `SFTTrainer`."""

    model: Any
    args: TrainingArguments | None
    data_collator: Callable[[list[Any]], Any] | None
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    has_own_loss: bool
    quantization_config: Any
    peft_config: Any
    formatting_func: Callable[[Any], Any] | None
    compute_metrics: Callable[..., dict[str, Any]] | None
    earlier: dict[str, Any]


def build_sft_parts(given: Given) -> SFTParts:
    """Make the parts, after checking what can be checked without a model. Seeds all random generators.

    Raises:
        ConfigError, DataError, ModelError, TypeError, ValueError: as for `SFTTrainer`.
    """
    args = sft_arguments(given.args, given.model, given.train_dataset, given.earlier)
    formatted, own_collator = given.formatting_func is not None, given.data_collator is not None
    check_settings(args, own_collator=own_collator, own_loss=given.has_own_loss, formatted=formatted)
    with_images = _with_images(given, args)
    base = open_tuned_model(
        given.model, args, given.processing_class, given.quantization_config, given.peft_config, with_images
    )
    check_answers(
        args,
        base.model,
        given.eval_dataset,
        with_images=with_images,
        formatted=formatted,
        scored=given.compute_metrics is not None,
    )
    router_weight = router_coefficient(args.router_aux_loss_coef, base.model)
    collator: Any = given.data_collator or DataCollatorForCausalLM(
        base.tokenizer.pad_token_id, args.joins_rows, pad_to_multiple_of=args.padding_step
    )
    images = open_images(base, args, formatted) if with_images else None
    if images is not None:
        collator = ImageCollator(collator, images, args.joins_rows)
    limits = ModelLimits.of(base.model)
    data = SFTData(args, base.tokenizer, given.formatting_func, own_collator, limits, images)
    answers = open_answers(args, base.tokenizer, limits, given.eval_dataset, given.compute_metrics)
    return SFTParts(args, base.model, base.processing_class, collator, data, router_weight, answers)


def _with_images(given: Given, args: SFTConfig) -> bool:
    """Return True if a dataset may have images, and is prepared here."""
    held = given.eval_dataset
    datasets = [given.train_dataset, *(held.values() if isinstance(held, Mapping) else [held])]
    is_own = given.data_collator is not None
    return not (args.skips_preparation or is_own) and any(map(holds_images, datasets))
