"""A configuration of `trl sft`: its script's, model's and dataset's arguments (TRL 1.16).

The defaults of its SFTConfig are those of Windlass's.
"""

from __future__ import annotations

from windlass.compat.conversion.datasets import (
    Dataset,
    is_on_hub,
    put_evaluation_data,
    put_streaming,
    put_training_data,
)
from windlass.compat.conversion.shared import (
    Conversion,
    ForeignConfig,
    named_items,
    put_adapter,
    put_dtype,
    put_model_options,
    put_old_training_keys,
    put_quantization,
)

SIGNS = ("model_name_or_path", "dataset_name", "use_peft", "lora_target_modules", "max_length")
REASONS: dict[str, str] = {}
# trl.ModelConfig, as far as it differs from peft's.
ADAPTER = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": None}


def convert(source: ForeignConfig, made: Conversion) -> None:
    """Convert all but the fields of `SFTConfig`, which a recipe has under the same names."""
    if name := source.take("model_name_or_path"):
        made.put("model.name", name)
    put_dtype(made, source, "dtype", "torch_dtype")
    put_model_options(made, source)
    put_old_training_keys(made, source)
    adapts = bool(source.take("use_peft", False))
    if adapts:
        put_adapter(made, source, ADAPTER, rank="lora_r")
    put_quantization(made, source, adapts)
    if made.get("quantization") == "nf4":
        made.put("quantization", source.take("bnb_4bit_quant_type", "nf4"))
        if source.take("use_bnb_nested_quant", False):
            made.lose(source, "use_bnb_nested_quant", "a recipe's weights of few bits are quantized once")
    source.skip(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "lora_task_type", "do_train", "overwrite_output_dir")
    )
    if length := source.take("max_seq_length"):
        made.put("training.max_length", length)
    found = _datasets(source, made)
    put_training_data(made, found, source, "datasets" if source.take("datasets") else "dataset_name")
    _evaluation(source, made, found)
    for key in ("dataset_streaming", "streaming"):
        put_streaming(made, source, key)


def _datasets(source: ForeignConfig, made: Conversion) -> list[Dataset]:
    name, subset = source.take("dataset_name"), source.take("dataset_config")
    split = source.take("dataset_train_split", "train")
    listed = source.take("datasets")
    if not listed:
        return [Dataset(name, _hub_options(name, subset, split))] if name else []
    found = []
    for within, values in named_items("datasets", listed):
        item = ForeignConfig(values, within=within)
        path = item.take("data_files") or item.values["path"]
        options = _hub_options(path, item.take("name"), item.take("split", "train"))
        found.append(Dataset(path, options, item.take("fraction")))
        item.skip(("path",))
        made.lose_rest(item, {})
    return found


def _hub_options(path: str, subset: str | None, split: str) -> dict[str, str]:
    options = {"subset": subset, "split": split if split != "train" else None}
    return {name: value for name, value in options.items() if value} if is_on_hub(path) else {}


def _evaluation(source: ForeignConfig, made: Conversion, found: list[Dataset]) -> None:
    """TRL evaluates on the split of that name if `eval_strategy` is set, and not at all if not."""
    split = source.take("dataset_test_split", "test")
    share = source.take("test_split_size")
    if share is not None:
        made.put("data.eval_fraction", share)
    elif source.values.get("eval_strategy", "no") not in ("no", False):
        if found and found[0].options.get("format") == "hub":
            options = {**found[0].options, "split": split}
            put_evaluation_data(made, [Dataset(found[0].path, options)], source, "dataset_test_split", found)
        else:
            made.lose(
                source,
                "dataset_test_split",
                "a file has no splits: set data.eval or data.eval_fraction",
                split,
            )
            made.lose(source, "eval_strategy", "without evaluation data")
