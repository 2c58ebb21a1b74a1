# ruff: noqa: RUF009 (`_option` makes a dataclass field)
"""The dataclasses that scripts of TRL parse, and adapters, quantization and datasets from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windlass.checkpoint.adapters import peft_library
from windlass.config.sections.setting import described
from windlass.core.device import visible_devices
from windlass.core.errors import DataError, Problem, refuse
from windlass.core.world import world_from_environment
from windlass.finetuning.base_model import few_bits
from windlass.text.tables import datasets_library

_SPLIT_SEED = 0
_DTYPES = ["auto", "bfloat16", "float16", "float32"]


def _option(default: Any, help: str, **others: Any) -> Any:
    return field(default=default, metadata={"help": help, **others})


@described()
@dataclass
class ModelConfig:
    """Which model a script loads, in how many bits, and with which adapter.

    Raises:
        ValueError: `load_in_8bit` and `load_in_4bit` together.
    """

    model_name_or_path: str | None = _option(None, "Name or folder of the model.")
    model_revision: str = _option("main", "Branch, tag or commit of the model.")
    dtype: str | None = _option("float32", "Dtype of the loaded weights.", choices=_DTYPES)
    attn_implementation: str | None = _option(None, "Attention, such as sdpa or flash_attention_2.")
    use_peft: bool = _option(False, "Train a LoRA adapter instead of the weights.")
    lora_r: int = _option(16, "Rank of the adapter.")
    lora_alpha: int = _option(32, "Scale of the adapter; divided by the rank.")
    lora_dropout: float = _option(0.05, "Dropout before the adapter.")
    lora_target_modules: list[str] | None = _option(None, "Modules that get adapters, or all-linear.")
    lora_target_parameters: list[str] | None = _option(None, "Parameters that get adapters.")
    lora_modules_to_save: list[str] | None = _option(None, "Modules that are trained as a whole.")
    lora_task_type: str = _option("CAUSAL_LM", "Task of the adapter; SEQ_CLS for classification.")
    use_rslora: bool = _option(False, "Divide the scale by the square root of the rank (arXiv:2312.03732).")
    use_dora: bool = _option(False, "Train the magnitude of weights apart (arXiv:2402.09353).")
    load_in_8bit: bool = _option(False, "Load the base in 8 bits.")
    load_in_4bit: bool = _option(False, "Load the base in 4 bits.")
    bnb_4bit_quant_type: str = _option("nf4", "4-bit type.", choices=["fp4", "nf4"])
    use_bnb_nested_quant: bool = _option(False, "Quantize the constants of the 4-bit weights too.")
    bnb_4bit_quant_storage: str | None = _option(None, "Dtype in which 4-bit weights are stored.")

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("You can't use 8 bit and 4 bit precision at the same time")
        # A word, such as "all-linear" or a regular expression, which in a list would be the name of a module.
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]


@described()
@dataclass
class ScriptArguments:
    """Which dataset a script loads."""

    dataset_name: str | None = _option(None, "Name or folder of the dataset.")
    dataset_config: str | None = _option(None, "Configuration of the dataset.")
    dataset_train_split: str = _option("train", "Split to train on.")
    dataset_test_split: str = _option("test", "Split to evaluate on.")
    dataset_streaming: bool = _option(False, "Read the dataset while it is loaded.")
    ignore_bias_buffers: bool = _option(False, "Leave boolean buffers out of what DDP sends.")


@dataclass
class DatasetConfig:
    """One dataset of a mixture; the names are those of `datasets.load_dataset`.

    Attributes:
        columns: columns to keep; None: all.
        fraction: share of the mixture. The mixture is as large as it can be without repeating a row.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: Any = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@described()
@dataclass
class DatasetMixtureConfig:
    """Datasets that are joined, and split into training and test rows; see `get_dataset`."""

    datasets: list[DatasetConfig] = field(
        default_factory=list, metadata={"help": "Datasets to join, each a mapping with a path."}
    )
    streaming: bool = _option(False, "Read the datasets while they are loaded.")
    test_split_size: float | None = _option(None, "Rows or share of rows for a test split; None: no split.")

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**item) if isinstance(item, dict) else item for item in self.datasets]


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
    return few_bits(
        "int8" if model_args.load_in_8bit else model_args.bnb_4bit_quant_type,
        None if model_args.dtype == "auto" else model_args.dtype,
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
    # Without a seed each process, and each restart of a run, would draw another split.
    return joined.train_test_split(test_size=mixture_config.test_split_size, seed=_SPLIT_SEED)


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
