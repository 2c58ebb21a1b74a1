"""Adapters, quantization and datasets from the dataclasses of scripts."""

from __future__ import annotations

from typing import Any

from windlass.checkpoint.adapters import peft_library
from windlass.core.device import visible_devices
from windlass.core.errors import DataError, Problem, refuse
from windlass.core.optional import require
from windlass.core.world import world_from_environment
from windlass.finetuning.script_arguments import DatasetConfig, DatasetMixtureConfig, ModelConfig
from windlass.text.tables import datasets_library


def get_peft_config(model_args: ModelConfig) -> Any:
    """Return the `LoraConfig` that the flags describe; None without `use_peft`."""
    if not model_args.use_peft:
        return None
    given = {"target_parameters": model_args.lora_target_parameters}
    return peft_library("train adapters (use_peft)").LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
        **{name: value for name, value in given.items() if value is not None},
    )


def get_quantization_config(model_args: ModelConfig) -> Any:
    """Return the `BitsAndBytesConfig` that the flags describe; None if the base is not quantized.

    Weights of 4 bits are computed with in `dtype`.
    """
    if not model_args.load_in_4bit and not model_args.load_in_8bit:
        return None
    transformers = require("transformers", "quantize a model")
    if model_args.load_in_8bit:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=None if model_args.dtype == "auto" else model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """The device map with which each process loads a quantized model onto its own accelerator; None without one."""
    return {"": world_from_environment().local_rank} if visible_devices() else None


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """Load the datasets of a mixture, join them, and split the result.

    Returns:
        a `DatasetDict` with "train", and with "test" if `test_split_size` is set.

    Raises:
        ConfigError: no dataset, or fractions for some of them or for streams.
        DataError: a dataset cannot be loaded.
    """
    _check_mixture(mixture_config)
    library = datasets_library("load the datasets of a mixture")
    parts = [_load(library, item, mixture_config.streaming) for item in mixture_config.datasets]
    shares = [item.fraction for item in mixture_config.datasets if item.fraction is not None]
    if shares:
        weights = [share / sum(shares) for share in shares]
        total = min(len(p) / weight for p, weight in zip(parts, weights, strict=True) if weight > 0)
        parts = [
            part.select(range(round(weight * total))) for part, weight in zip(parts, weights, strict=True)
        ]
    joined = library.concatenate_datasets(parts)
    if mixture_config.test_split_size is None:
        return library.DatasetDict({"train": joined})
    return joined.train_test_split(test_size=mixture_config.test_split_size)


def _check_mixture(mixture: DatasetMixtureConfig) -> None:
    problems = []
    if not mixture.datasets:
        problems.append(Problem("datasets", [], "name at least one dataset, each with a path"))
    shares = [item.fraction for item in mixture.datasets]
    if any(s is not None for s in shares) and any(s is None for s in shares):
        problems.append(
            Problem("datasets.fraction", shares, "set it for all datasets of the mixture or for none")
        )
    if mixture.streaming and any(s is not None for s in shares):
        problems.append(Problem("datasets.fraction", shares, "a stream has no length; set streaming=False"))
    if mixture.streaming and mixture.test_split_size is not None:
        fix = "a stream cannot be split; name a test split, or set streaming=False"
        problems.append(Problem("test_split_size", mixture.test_split_size, fix))
    refuse(problems)


def _load(library: Any, item: DatasetConfig, streaming: bool) -> Any:
    try:
        dataset = library.load_dataset(
            item.path,
            item.name,
            data_dir=item.data_dir,
            data_files=item.data_files,
            split=item.split,
            streaming=streaming,
        )
    except Exception as error:  # network, name, split and files raise different types
        raise DataError(
            f"the dataset {item.path!r} (split {item.split!r}) cannot be loaded: {error}"
        ) from error
    return dataset if item.columns is None else dataset.select_columns(item.columns)
