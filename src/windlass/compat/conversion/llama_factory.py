"""A configuration of LLaMA-Factory, with its list of datasets, dataset_info.json.

Keys and defaults are those of github.com/hiyouga/LLaMA-Factory: `llamafactory/hparams/` finetuning_args.py,
model_args.py and training_args.py (commit 00577a8), data_args.py (072bfe2), parser.py (f74d33f), and
`llamafactory/data/parser.py` (01d3ac6); those that it inherits are of transformers' Seq2SeqTrainingArguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.compat.conversion.datasets import (
    Dataset,
    holds_conversations,
    is_on_hub,
    messages_of,
    put_evaluation_data,
    put_streaming,
    put_training_data,
)
from windlass.compat.conversion.shared import (
    Conversion,
    ForeignConfig,
    put_adapter,
    put_early_stopping,
    put_fraction,
    put_model_options,
    put_old_training_keys,
)
from windlass.config.documents import load

SIGNS = ("stage", "finetuning_type", "cutoff_len", "lora_rank", "dataset_dir")
# key of the file -> key of the recipe, and the program's default; None = that of a recipe
_KEYS: dict[str, tuple[str, Any]] = {
    "model_name_or_path": ("model.name", None),
    "max_samples": ("data.max_samples", None),
    "cutoff_len": ("training.max_length", 2048),
    "packing": ("training.packing", None),
    "preprocessing_num_workers": ("training.dataset_num_proc", None),
    "learning_rate": ("training.learning_rate", 5e-5),
    "logging_steps": ("training.logging_steps", 500),
    "bf16": ("training.bf16", False),
    "moe_aux_loss_coef": ("training.router_aux_loss_coef", None),
    "enable_liger_kernel": ("training.use_liger_kernel", None),
}
_NO_EFFECT = (
    "do_train", "overwrite_cache", "overwrite_output_dir", "plot_loss", "low_cpu_mem_usage",
    "use_fast_tokenizer", "use_reentrant_gc", "preprocessing_batch_size", "ray_run_name", "ray_storage_path",
    "ray_num_workers", "resources_per_worker", "placement_strategy", "media_dir", "include_num_input_tokens_seen",
)  # fmt: skip
_TEMPLATE = "the chat template of the tokenizer is used; set training.chat_template_path for another one"
REASONS = {
    "template": _TEMPLATE,
    "mask_history": "each of the assistant's turns is trained on",
    "adapter_name_or_path": "a recipe begins a new adapter",
}
_FLASH = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "disabled": "eager"}
_TAGS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "assistant"),
    "system_tag": ("system", "system"),
}


def convert(source: ForeignConfig, made: Conversion) -> None:
    """Convert all but the keys that the section `training` has under the same names."""
    for name, (dotted, default) in _KEYS.items():
        if (value := source.take(name, default)) is not None:
            made.put(dotted, value)
    if source.take("neat_packing", False):
        made.put("training.packing", True)
    if source.take("disable_gradient_checkpointing", False):
        made.put("training.gradient_checkpointing", False)
    if source.take("use_dft_loss", False):
        made.put("training.loss_type", "dft")
    if source.take("disable_shuffling", False):
        made.put("training.train_sampling_strategy", "sequential")
    put_old_training_keys(made, source)
    put_model_options(made, source)
    if (kernel := source.take("flash_attn", "auto")) != "auto":
        made.put("training.model_init_kwargs.attn_implementation", _FLASH.get(kernel, kernel))
    _method(made, source)
    put_early_stopping(made, source, "early_stopping_steps")
    if source.take("use_swanlab", False):
        # Beside the others. Without the key there are none.
        others = source.take("report_to", "none")
        others = others if isinstance(others, list) else [others]
        made.put("training.report_to", [*(name for name in others if name != "none"), "swanlab"])
        made.put("training.project", source.take("swanlab_project", "llamafactory"))
        if name := source.take("swanlab_run_name"):
            made.put("training.run_name", name)
    _data(made, source)
    source.skip(("stage", *_NO_EFFECT))


def _method(made: Conversion, source: ForeignConfig) -> None:
    """The adapter, weights of few bits, and the dtype of the weights."""
    kind = source.take("finetuning_type", "lora")
    adapts = kind == "lora"
    if adapts:
        rank = source.take("lora_rank", 8)
        alpha = source.take("lora_alpha") or 2 * rank
        put_adapter(
            made, source, {"r": rank, "lora_alpha": alpha, "target_modules": "all-linear"}, rank="lora_rank"
        )
        if source.take("pissa_init", False):
            made.put("adapter.init_lora_weights", "pissa")
            if source.take("pissa_iter", 16) != -1:
                # A base that is drawn at random is one that no saved adapter fits.
                made.lose(source, "pissa_iter", "the decomposition is exact, as with -1", 16)
    elif kind != "full":
        made.lose(
            source,
            "finetuning_type",
            "is not a method that a recipe has: an adapter (lora) or all weights (full)",
        )
    if bits := source.take("quantization_bit"):
        if not adapts:
            made.lose(source, "quantization_bit", "needs an adapter, which is trained instead")
        elif bits not in (4, 8):
            made.lose(source, "quantization_bit", "weights of 4 or 8 bits are built")
        else:
            made.put("quantization", source.take("quantization_type", "nf4") if bits == 4 else "int8")
            if bits == 4 and source.take("double_quantization", True):
                made.lose(source, "double_quantization", "scales are not quantized once more", True)
    source.skip(("quantization_type", "double_quantization"))
    if source.take("quantization_method", "bnb") not in ("bnb", "bitsandbytes"):
        made.lose(source, "quantization_method", "weights of few bits are those of bitsandbytes")
    pure = bool(source.take("pure_bf16", False))
    # The base of an adapter is loaded in the dtype that is computed in; weights that are trained are float32.
    if pure or (adapts and made.get("training.bf16")):
        made.put("model.dtype", "bfloat16")
    elif adapts and source.values.get("fp16"):
        made.put("model.dtype", "float16")


# --- data -------------------------------------------------------------------------------------------------------------


def _data(made: Conversion, source: ForeignConfig) -> None:
    folder = source.take("dataset_dir", "data")
    train, held = (_datasets(made, source, name, str(folder)) for name in ("dataset", "eval_dataset"))
    strategy, shares = source.take("mix_strategy", "concat"), source.take("interleave_probs")
    if shares is not None:
        weights = [float(share) for share in (shares.split(",") if isinstance(shares, str) else shares)]
        for item, weight in zip(train, weights, strict=False):
            item.weight = weight
    if strategy == "interleave_over":
        made.lose(source, "mix_strategy", "an epoch ends when the first source has no new rows")
    kept = put_training_data(made, train, source, "dataset")
    put_evaluation_data(made, held, source, "eval_dataset", train)
    if not held:
        put_fraction(made, source, "val_size")
    put_streaming(made, source, "streaming")
    source.skip(("buffer_size",))
    if source.take("train_on_prompt", False):
        made.put("training.completion_only_loss", False)
    elif not train or any(item.conversational for item in kept):
        made.put("training.assistant_only_loss", True)


def _datasets(made: Conversion, source: ForeignConfig, key: str, folder: str) -> list[Dataset]:
    """The datasets that a key names: entries of dataset_info.json, or files."""
    names = source.take(key, [])
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    place, listed = _listed(source.folder, folder)
    found = [_listed_dataset(made, name, listed[name], place) for name in names if name in listed]
    others = [name for name in names if name not in listed]
    found += [
        Dataset(name, conversational=holds_conversations(name)) for name in others if not is_on_hub(name)
    ]
    if unknown := list(filter(is_on_hub, others)):
        file = Path(folder) / "dataset_info.json"
        why = (
            f"{', '.join(unknown)} is not in {file}, or there is no such file: convert again with dataset_dir=FOLDER, "
            f"where that list is, or with {key}=FILE.jsonl"
        )
        made.lose(source, key, why)
    return found


def _listed(beside: Path, folder: str) -> tuple[Path, dict[str, Any]]:
    """The folder of the list of datasets, and the list. The folder is relative to the working directory, as
    LLaMA-Factory reads it, else to that of the configuration.
    """
    for place in (Path(folder), beside / folder):
        file = place / "dataset_info.json"
        if file.is_file():
            return place, load(file).values
    return Path(folder), {}


def _listed_dataset(made: Conversion, name: str, values: dict[str, Any], folder: Path) -> Dataset:
    item = ForeignConfig(values, within=f"dataset_info.{name}.")
    columns = ForeignConfig(item.take("columns", {}), within=item.dotted("columns."))
    options: dict[str, Any] = {"subset": item.take("subset")}
    if (split := item.take("split", "train")) != "train":
        options["split"] = split
    conversational = item.take("formatting", "alpaca") == "sharegpt"
    if conversational:
        tags = ForeignConfig(item.take("tags", {}), within=item.dotted("tags."))
        words = {tags.take(tag, usual): role for tag, (usual, role) in _TAGS.items()}
        usual = dict(_TAGS.values())
        place = (
            columns.take("messages", "conversations"),
            tags.take("role_tag", "from"),
            tags.take("content_tag", "value"),
        )
        known = words == usual or all(word == role for word, role in words.items())
        options |= messages_of(*place, {} if known else words)
        made.lose_rest(tags, {})
    else:
        theirs = {"instruction": "prompt", "input": "query", "output": "response"}
        renamed = {columns.take(their, our): our for our, their in theirs.items()}
        options["rename"] = {old: new for old, new in renamed.items() if old != new}
    system = columns.take("system", "system")
    if system != "system":
        options["rename"] = {**options.get("rename", {}), system: "system"}
    if columns.take("tools", "tools") != "tools":
        options["rename"] = {**options.get("rename", {}), columns.take("tools"): "tools"}
    path = item.take("hf_hub_url") or str(folder / item.take("file_name", name))
    item.skip(("file_name", "ms_hub_url", "om_hub_url"))
    made.lose_rest(columns, {"history": "the turns before are not joined to the prompt"})
    made.lose_rest(item, {})
    return Dataset(
        path, {key: value for key, value in options.items() if value}, conversational=conversational
    )
