"""What contradicts what in the arguments of an `SFTTrainer`, before its model trains."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from windlass.core.attributes import text_config
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.module_state import without_adapters
from windlass.finetuning.sft_config import SFTConfig

_KNOWN_DATASET_OPTIONS = ("skip_prepare_dataset", "allow_image_urls")


def check_settings(args: SFTConfig, *, own_collator: bool, own_loss: bool, formatted: bool) -> None:
    """Raise ConfigError with everything that contradicts.

    Args:
        own_collator: the script passed a collator.
        own_loss: the script passed `compute_loss_func`.
        formatted: the script passed `formatting_func`.
    """
    refuse([*_data_problems(args, own_collator, formatted), *_loss_problems(args, own_loss)])
    if own_loss:
        warnings.warn(
            "`compute_loss_func` is deprecated: subclass `SFTTrainer` and override `compute_loss`",
            FutureWarning,
            stacklevel=3,
        )


def _data_problems(args: SFTConfig, own_collator: bool, formatted: bool) -> Iterator[Problem]:
    if own_collator and args.joins_rows:
        why = "padding_free" if args.padding_free else "packing"
        fix = "batches are one row without padding, which only the built-in collator makes; leave data_collator out"
        yield Problem(why, True, fix)
    if args.padding_free and not args.packing and args.max_length is not None and not args.skips_preparation:
        fix = (
            "`max_length` is not enforced on rows without padding: set packing=True, or pass truncated data and set "
            "max_length=None"
        )
        yield Problem("max_length", args.max_length, fix)
    if args.packing and args.max_length is None:
        yield Problem("max_length", None, "When packing is enabled, `max_length` can't be `None`")
    if formatted and args.completion_only_loss and not args.skips_preparation:
        fix = (
            "a formatting function returns one text, which has no completion: apply it before, or leave one of the two "
            "out"
        )
        yield Problem("completion_only_loss", True, fix)
    options = args.dataset_kwargs if isinstance(args.dataset_kwargs, dict) else {}
    for name, value in options.items():
        if name not in _KNOWN_DATASET_OPTIONS:
            known = " and ".join(_KNOWN_DATASET_OPTIONS)
            yield Problem(f"dataset_kwargs.{name}", value, f"the options are {known}")
        elif value not in (True, False, None):
            yield Problem(f"dataset_kwargs.{name}", value, "must be True or False")  # "false" is true


def _loss_problems(args: SFTConfig, own_loss: bool) -> Iterator[Problem]:
    if args.loss_type == "dft" and own_loss:
        yield Problem("loss_type", "dft", "is a loss of its own; leave out compute_loss_func")
    if args.loss_type == "dft" and args.label_smoothing_factor:
        fix = "does not apply to loss_type='dft'; leave it out"
        yield Problem("label_smoothing_factor", args.label_smoothing_factor, fix)


def router_coefficient(given: float | None, model: Any) -> float:
    """The weight of the experts' load-balancing loss, 0 for a model without experts. It is written to the model's
    config, which otherwise adds the loss itself. Raises ConfigError if `given` is not 0, and the model returns no
    router logits.
    """
    text = text_config(model)
    if not hasattr(text, "output_router_logits"):
        if given:
            fix = (
                f"{type(without_adapters(model)).__name__} is not a Mixture-of-Experts model that returns its router "
                "logits, so there is no auxiliary loss to weight"
            )
            raise ConfigError(Problem("router_aux_loss_coef", given, fix))
        return 0.0
    weight = float(getattr(text, "router_aux_loss_coef", 0.0) if given is None else given)
    text.output_router_logits = weight != 0.0
    text.router_aux_loss_coef = weight
    for module in model.modules():  # models copy it when they are made
        if hasattr(module, "router_aux_loss_coef"):
            module.router_aux_loss_coef = weight
    return weight
