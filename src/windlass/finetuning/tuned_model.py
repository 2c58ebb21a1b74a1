"""The model, tokenizer and adapter of a trainer that tunes language models, whatever its data and its loss are."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from windlass.assemble.resolve import resolve_parallel
from windlass.config.accelerator_config import AcceleratorConfig
from windlass.config.arguments import TrainingArguments
from windlass.config.sections.setting import default_of
from windlass.core.device import make_current
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.world import world_from_environment
from windlass.finetuning.base_model import (
    name_of,
    open_model,
    open_tokenizer,
    set_special_tokens,
    write_special_tokens,
)
from windlass.finetuning.peft_adapters import (
    add_adapter,
    is_peft_model,
    is_quantized,
    let_gradients_in,
    with_head,
)
from windlass.finetuning.templates import adopt_template
from windlass.finetuning.tuning_config import LORA_B, TuningConfig
from windlass.text.tables import is_stream
from windlass.trainer.defaults import seed_all
from windlass.transforms.buffers import inner_tensors
from windlass.transforms.few_bits import keep_trainable
from windlass.transforms.first_rank import to_meta

logger = get_job_logger(__name__)

Config = TypeVar("Config", bound=TuningConfig)


def begin_tuning(
    kind: type[Config], args: object, model: Any, train_dataset: Any, values: dict[str, Any] | None = None
) -> Config:
    """Return the arguments as `kind`, after a check of the training dataset.

    Args:
        kind: such as `SFTConfig`; the default output folder ends with what comes before "Config" in its name.
        args: a `kind`; a `TrainingArguments`, whose values are kept; or None: the defaults, with an output folder named
            after the model.
        values: replace values of `args`.

    Raises:
        ConfigError: another type.
        ValueError, TypeError: there is no training dataset, or it cannot be prepared.
    """
    found = _as_kind(kind, args, model, values or {})
    _check_train_dataset(train_dataset)
    if is_stream(train_dataset):
        _read_on_each_rank(found)
    return found


def _as_kind(kind: type[Config], args: object, model: Any, values: dict[str, Any]) -> Config:
    if args is None:
        name = name_of(model).rstrip("/").rpartition("/")[2]
        args = kind(f"{name or 'model'}-{kind.__name__.removesuffix('Config')}")
    elif not isinstance(args, TrainingArguments):
        given = f"{type(args).__module__}.{type(args).__qualname__}"
        fix = f"give windlass.{kind.__name__}(...) or windlass.TrainingArguments(...)"
        raise ConfigError(Problem("args", given, fix))
    if isinstance(args, kind):
        return dataclasses.replace(args, **values) if values else args
    return _converted(kind, args, values)


def _converted(kind: type[Config], args: TrainingArguments, values: dict[str, Any]) -> Config:
    """A `kind` with the values of `args`; what a script's subclass adds to them is kept as attributes."""
    known = {field.name for field in dataclasses.fields(kind)}
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    # All fields, so that nothing that the script did not ask for is remarked on a second time.
    defaults = {f.name: default_of(f) for f in dataclasses.fields(kind)}
    converted = kind(**{**defaults, **{k: v for k, v in given.items() if k in known}, **values})
    for name in given.keys() - known:
        setattr(converted, name, given[name])
    return converted


def _check_train_dataset(dataset: Any) -> None:
    if dataset is None:
        raise ValueError("`train_dataset` is required")
    is_dataset = hasattr(dataset, "__iter__") or (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    )
    if isinstance(dataset, (str, bytes, Mapping)) or not is_dataset:
        splits = ", ".join(map(repr, dataset)) if isinstance(dataset, Mapping) else ""
        raise TypeError(
            "`train_dataset` must be a `Dataset` or `IterableDataset` of the package datasets, or a sequence of "
            f"mappings, got `{type(dataset).__name__}`"
            + (f"; pass one of its parts: {splits}" if splits else "")
        )


def _read_on_each_rank(args: TuningConfig) -> None:
    """Turn `dispatch_batches` off for a stream: rank 0 cannot join batches of several lengths."""
    config = args.accelerator_config
    if isinstance(config, AcceleratorConfig):
        if config.dispatch_batches:
            logger.warning("dispatch_batches=True does not apply to an IterableDataset; using False")
        # Another object: the script may pass this one to further trainers.
        args.accelerator_config = dataclasses.replace(config, dispatch_batches=False)


_SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True, slots=True)
class TunedModel:
    """A model to tune."""

    model: nn.Module  # with its adapter, if one is trained
    processing_class: Any  # tokenizer, or a processor with one
    tokenizer: Any  # the tokenizer itself, with its special tokens and chat template set


def open_tuned_model(
    model: Any,
    args: TuningConfig,
    processing_class: Any = None,
    quantization_config: Any = None,
    peft_config: Any = None,
    with_images: bool = False,
    labels: int | None = None,
) -> TunedModel:
    """Load or build the model and its tokenizer, and add the adapter. Seeds all random generators. With
    `cpu_ram_efficient_loading` only the first process of each machine has weights, until the model is sharded.

    Args:
        model: a module; a name or folder; or a config of transformers, for new weights.
        args: its fields on the model, the tokenizer and gradient checkpointing are read, none on data or loss.
        processing_class: by default the tokenizer in the model's folder or repository.
        quantization_config: how a loaded model is quantized.
        peft_config: the adapter to train; the model's own weights are frozen.
        with_images: a processor is looked for, instead of a tokenizer.
        labels: the outputs of a sequence classifier, which is tuned instead; its head is trained beside an adapter.

    Raises:
        ConfigError, ModelError, TypeError: what cannot be loaded, or not combined.
    """
    # Loaders of few bits put weights on the current device, which would be the first one on every rank.
    make_current(args.device)
    seed_all(args)  # new weights and new adapters are drawn from these generators
    empty = isinstance(model, str) and receives_weights(args)
    if isinstance(model, str):
        _check_placement(args)
    opened = open_model(model, args, quantization_config, empty=empty, labels=labels)
    if labels is not None:
        peft_config = with_head(opened, labels, peft_config)
    keep_trainable(opened)
    _check_torchao(opened)
    _check_sharding(args, opened)
    if empty:  # also what had to be read, because the other process sends all weights
        to_meta(opened)
    processing_class = open_tokenizer(processing_class, opened, args, with_images)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    new_tokens = adopt_template(getattr(args, "chat_template_path", None), opened, processing_class)
    set_special_tokens(tokenizer, args)
    write_special_tokens(tokenizer, opened)
    if peft_config is not None:
        opened = add_adapter(opened, peft_config, new_tokens)
        _note_revision(opened, model, args)
    _check_loraplus(args, opened)
    if is_peft_model(opened) and args.gradient_checkpointing:
        let_gradients_in(opened)
    return TunedModel(opened, processing_class, tokenizer)


def _note_revision(adapted: Any, model: Any, args: TuningConfig) -> None:
    """Note the revision of the base in the configuration of its adapter, which would be put on another one later. The
    configuration may have that of an earlier trainer's base.
    """
    if isinstance(model, str):
        options: Any = args.model_init_kwargs or {}
        adapted.active_peft_config.revision = options.get("revision")


def _check_loraplus(args: TuningConfig, model: nn.Module) -> None:
    ratio = args.loraplus_lr_ratio
    if ratio is not None and not any(
        re.search(LORA_B, name) and p.requires_grad for name, p in model.named_parameters()
    ):
        fix = "is of the matrices B of LoRA, and none is trained: pass peft_config=LoraConfig(...), or leave it out"
        raise ConfigError(Problem("loraplus_lr_ratio", ratio, fix))


def receives_weights(args: TuningConfig) -> bool:
    """Return True if another process of this machine has the weights, and sends them when the model is sharded."""
    world = world_from_environment()
    shard = resolve_parallel(args, world).dist.shard
    return shard is not None and shard.ram_efficient and not world.is_local_main


def _check_placement(args: TuningConfig) -> None:
    """Raise ConfigError if a `device_map` spreads a model over devices that sharding divides among ranks."""
    options = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    where = options.get("device_map")
    whole = where is None or (isinstance(where, Mapping) and len(set(where.values())) == 1)
    spreads = where in _SPREADING if isinstance(where, str) else not (whole or isinstance(where, int))
    if spreads and resolve_parallel(args, world_from_environment()).dist.shard is not None:
        fix = "spreads the model over devices, and FSDP2 divides it among ranks: leave it out, or name one device"
        raise ConfigError(Problem("model_init_kwargs.device_map", where, fix))


def _check_torchao(model: nn.Module) -> None:
    """Raise ConfigError if torchao quantized no layer, or no gradient passes through those that it did."""
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    form = getattr(config, "quant_type", None)
    if form is None:
        return
    fix = ""
    if "DynamicActivation" in type(form).__name__:
        fix = (
            "rounds the inputs of layers, and torchao passes no gradient on through them: use a form for weights alone "
            "(Int8WeightOnlyConfig, IntxWeightOnlyConfig), or train all weights with qat"
        )
    elif not any(map(inner_tensors, model.parameters())):
        fix = (
            "fits no layer of the model, so that none was quantized; compare its group_size with their sizes"
        )
    if fix:
        raise ConfigError(Problem("quantization_config", type(form).__name__, fix))


def _check_sharding(args: TuningConfig, model: nn.Module) -> None:
    """Raise ConfigError for a quantized model under FSDP2, unless its packed weights have the shape of a column of
    floating-point numbers: FSDP2 divides those like any other weight, and their scales stay on each process.
    """
    if not is_quantized(model) or resolve_parallel(args, world_from_environment()).dist.shard is None:
        return
    packed = [p for p in model.parameters() if hasattr(p, "quant_state")]
    if not packed:
        fix = (
            "divides weights of few bits of bitsandbytes alone (NF4 and FP4); those of torchao have neither the "
            "operation that splits them nor the hooks that gather them: use bitsandbytes, or several processes without "
            "fsdp"
        )
        raise ConfigError(Problem("fsdp", args.fsdp, fix))
    whole = {p.dtype for p in model.parameters()} - {p.dtype for p in packed}
    stored = next(iter(packed)).dtype
    if not stored.is_floating_point or whole:
        fix = (
            "FSDP2 divides 4-bit weights that are stored in the dtype of the other weights: "
            f"BitsAndBytesConfig(bnb_4bit_quant_storage={_storage(model)}), and dtype={_storage(model)} for the model"
        )
        raise ConfigError(Problem("quantization_config.bnb_4bit_quant_storage", str(stored), fix))


def _storage(model: nn.Module) -> str:
    """The dtype of the weights that are not packed."""
    return str(next(p.dtype for p in model.parameters() if not hasattr(p, "quant_state")))
