# ruff: noqa: RUF009 (`_option` makes a dataclass field)
"""The dataclasses from which scripts of TRL make their flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windlass.config.sections.setting import described

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
