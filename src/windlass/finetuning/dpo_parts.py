"""The parts of a `DPOTrainer`, checked and made from what a script passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from windlass.config.arguments import TrainingArguments
from windlass.core.errors import ConfigError, Problem
from windlass.data.collate_branches import DataCollatorForSharedPrompts
from windlass.data.collate_preference import DataCollatorForPreference
from windlass.finetuning.dpo_config import DPOConfig
from windlass.finetuning.frozen_reference import ReferenceChoice, keep_adapter, without_dropout
from windlass.finetuning.peft_adapters import is_peft_model
from windlass.finetuning.preference_data import PreferenceData
from windlass.finetuning.reference_config import ReferenceConfig
from windlass.finetuning.sft_checks import router_coefficient, settle_stream
from windlass.finetuning.sft_data import check_train_dataset
from windlass.finetuning.tuned_model import TunedModel, open_tuned_model
from windlass.finetuning.tuning_arguments import tuning_arguments
from windlass.text.pair_encoder import PairOptions
from windlass.text.tables import is_stream
from windlass.transforms.model_limits import ModelLimits


@dataclass(frozen=True, slots=True)
class DPOParts:
    """What a trainer is made of.

    Attributes:
        args: the settings.
        model: with its adapter, if one is trained.
        processing_class: the tokenizer.
        collator: list of samples -> batch.
        data: prepares datasets.
        router_weight: of the load-balancing loss of experts; 0 if there are none.
        reference: what the model is compared with.
    """

    args: DPOConfig
    model: nn.Module
    processing_class: Any
    collator: Callable[[list[Any]], Any]
    data: PreferenceData
    router_weight: float
    reference: ReferenceChoice


@dataclass(frozen=True, slots=True)
class GivenForDPO:
    """What a script passes to the constructor; see `DPOTrainer`."""

    model: Any
    ref_model: nn.Module | None
    args: TrainingArguments | None
    data_collator: Callable[[list[Any]], Any] | None
    train_dataset: Any
    processing_class: Any
    quantization_config: Any
    peft_config: Any
    has_metrics: bool


def build_dpo_parts(given: GivenForDPO) -> DPOParts:
    """Make the parts, after checking what can be checked without a model. Seeds all random generators.

    Raises:
        ConfigError, DataError, ModelError, TypeError, ValueError: as for `DPOTrainer`.
    """
    args = tuning_arguments(DPOConfig, given.args, given.model)
    _check_rows(given, args)
    check_train_dataset(given.train_dataset)
    settle_stream(args, is_stream(given.train_dataset))
    base = open_tuned_model(
        given.model, args, given.processing_class, given.quantization_config, given.peft_config
    )
    router_weight = router_coefficient(args.router_aux_loss_coef, base.model)
    collator = given.data_collator or _collator(
        args, base.tokenizer.pad_token_id, has_router=router_weight != 0
    )
    reference = choose_reference(given.ref_model, base, args, had_adapter=is_peft_model(given.model))
    options = PairOptions(
        max_length=args.max_length, truncation_mode=args.truncation_mode, num_proc=args.dataset_num_proc
    )
    numbers = ("ref_chosen_logps", "ref_rejected_logps")
    data = PreferenceData(base.tokenizer, options, ModelLimits.of(base.model), numbers)
    return DPOParts(args, base.model, base.processing_class, collator, data, router_weight, reference)


def _check_rows(given: GivenForDPO, args: DPOConfig) -> None:
    """Raise ConfigError if pairs in one row contradict what the script passes."""
    if not args.padding_free:
        return
    if given.data_collator is not None:
        fix = "batches are one row without padding, which only the built-in collator makes; leave data_collator out"
        raise ConfigError(Problem("padding_free", True, fix))
    if given.has_metrics:
        fix = "`compute_metrics` gets the logits of padded batches; leave one of the two out"
        raise ConfigError(Problem("padding_free", True, fix))


def _collator(args: DPOConfig, pad_token_id: int, *, has_router: bool) -> DataCollatorForPreference:
    multiple = args.pad_to_multiple_of if isinstance(args.pad_to_multiple_of, int) else None
    options = (pad_token_id, args.max_length, args.truncation_mode, multiple)
    if not args.padding_free:
        return DataCollatorForPreference(*options)
    # The balancing loss of experts is a mean over all tokens that are computed.
    return DataCollatorForSharedPrompts(*options, shares_prompts=not has_router)


def choose_reference(
    ref_model: nn.Module | None, base: TunedModel, args: ReferenceConfig, *, had_adapter: bool
) -> ReferenceChoice:
    """Decide what the model is compared with, and set dropout to 0 if that is asked for.

    Args:
        ref_model: the reference that the script passes, if it does.
        had_adapter: the script passes a model that has an adapter, which is trained further.

    Raises:
        ConfigError: the reference is the model itself, or it cannot be moved as `sync_ref_model` asks.
    """
    if ref_model is base.model:
        fix = "`model` and `ref_model` cannot be the same object; leave it out, and a copy of `model` is made for you"
        raise ConfigError(Problem("ref_model", type(ref_model).__name__, fix))
    adapted = is_peft_model(base.model) and ref_model is None
    if args.sync_ref_model and adapted:
        fix = "needs a reference of its own, and with an adapter it is the model without it; leave it out"
        raise ConfigError(Problem("sync_ref_model", True, fix))
    if args.disable_dropout:
        for model in (base.model, ref_model):
            if model is not None:
                without_dropout(model)
    if adapted and had_adapter:
        keep_adapter(base.model)
    return ReferenceChoice(base.model, ref_model, args.disable_dropout, args.precompute_ref_log_probs)
