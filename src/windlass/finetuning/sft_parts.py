"""The parts of an `SFTTrainer`, made in the order in which they depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from windlass.assemble.resolve import resolve_parallel
from windlass.config.sft import SFTConfig
from windlass.core.errors import ConfigError, Problem
from windlass.core.world import world_from_environment
from windlass.data.collate_causal import DataCollatorForCausalLM
from windlass.finetuning.base_model import (
    open_model,
    open_tokenizer,
    set_special_tokens,
    write_special_tokens,
)
from windlass.finetuning.peft_adapters import add_adapter, is_peft_model, is_quantized, let_gradients_in
from windlass.finetuning.sft_arguments import sft_arguments
from windlass.finetuning.sft_checks import check_settings, router_coefficient, settle_stream
from windlass.finetuning.sft_data import SFTData, check_train_dataset
from windlass.finetuning.templates import adopt_template
from windlass.text.tables import is_stream
from windlass.trainer.defaults import seed_all
from windlass.transforms.few_bits import keep_trainable
from windlass.transforms.neftune import vocabulary_of


@dataclass(frozen=True, slots=True)
class SFTParts:
    """What a trainer is made of.

    Attributes:
        args: the settings.
        model: with its adapter, if one is trained.
        processing_class: tokenizer, or a processor with one.
        collator: list of samples -> batch.
        data: prepares datasets.
        router_weight: of the load-balancing loss of experts; 0 if there are none.
    """

    args: SFTConfig
    model: nn.Module
    processing_class: Any
    collator: Callable[[list[Any]], Any]
    data: SFTData
    router_weight: float


@dataclass(frozen=True, slots=True)
class Given:
    """What a script passes to the constructor; see `SFTTrainer`."""

    model: Any
    args: Any
    data_collator: Callable[[list[Any]], Any] | None
    train_dataset: Any
    processing_class: Any
    has_own_loss: bool
    quantization_config: Any
    peft_config: Any
    formatting_func: Callable[[Any], Any] | None
    earlier: dict[str, Any]


def build_sft_parts(given: Given) -> SFTParts:
    """Make the parts, after checking what can be checked without a model. Seeds all random generators.

    Raises:
        ConfigError, DataError, ModelError, TypeError, ValueError: as for `SFTTrainer`.
    """
    args = sft_arguments(given.args, given.model, given.earlier)
    check_train_dataset(given.train_dataset)
    settle_stream(args, is_stream(given.train_dataset))
    formatted, own_collator = given.formatting_func is not None, given.data_collator is not None
    check_settings(args, own_collator=own_collator, own_loss=given.has_own_loss, formatted=formatted)
    seed_all(args)  # new adapters are drawn from these generators
    model = open_model(given.model, args, given.quantization_config)
    keep_trainable(model)
    _check_sharding(args, model)
    processing_class = open_tokenizer(given.processing_class, model, args)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    new_tokens = adopt_template(args.chat_template_path, model, processing_class)
    set_special_tokens(tokenizer, args)
    write_special_tokens(tokenizer, model)
    router_weight = router_coefficient(args, model)
    if given.peft_config is not None:
        model = add_adapter(model, given.peft_config, new_tokens)
    if is_peft_model(model) and args.gradient_checkpointing:
        let_gradients_in(model)
    step = args.pad_to_multiple_of if isinstance(args.pad_to_multiple_of, int) else None
    collator = given.data_collator or DataCollatorForCausalLM(
        tokenizer.pad_token_id, args.joins_rows, pad_to_multiple_of=step
    )
    data = SFTData(args, tokenizer, given.formatting_func, own_collator, vocabulary_of(model))
    return SFTParts(args, model, processing_class, collator, data, router_weight)


def _check_sharding(args: SFTConfig, model: nn.Module) -> None:
    """Raise ConfigError for a quantized model under FSDP2, which cannot divide packed weights and their constants."""
    if is_quantized(model) and resolve_parallel(args, world_from_environment()).dist.shard is not None:
        fix = "does not divide weights of few bits; train without fsdp (each process holds the base)"
        raise ConfigError(Problem("fsdp", args.fsdp, fix))
