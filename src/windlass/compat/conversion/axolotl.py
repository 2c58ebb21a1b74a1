"""A configuration of Axolotl.

Keys and defaults are those of github.com/axolotl-ai-cloud/axolotl: `axolotl/utils/schemas/` config.py (commit 70be546),
training.py (002a637), peft.py (00564c8), datasets.py (07e83ab), and `axolotl/core/builders/base.py` (ceda25b).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.compat.conversion.datasets import (
    Dataset,
    is_on_hub,
    messages_of,
    put_evaluation_data,
    put_training_data,
)
from windlass.compat.conversion.shared import (
    Conversion,
    ForeignConfig,
    named_items,
    put_adapter,
    put_early_stopping,
    put_fraction,
    put_model_options,
    put_old_training_keys,
    put_quantization,
)
from windlass.text.forms import ALPACA, ALPACA_WITH_INPUT

SIGNS = ("base_model", "sequence_len", "micro_batch_size", "val_set_size")
# key of the file -> key of the recipe, and the program's default; None = it has none, or it is that of a recipe
_KEYS: dict[str, tuple[str, Any]] = {
    "base_model": ("model.name", None),
    "tokenizer_config": ("tokenizer.name", None),
    "sequence_len": ("training.max_length", 512),
    "sample_packing": ("training.packing", None),
    "eval_sample_packing": ("training.eval_packing", None),
    "micro_batch_size": ("training.per_device_train_batch_size", 1),
    "num_epochs": ("training.num_train_epochs", 1.0),
    "optimizer": ("training.optim", None),
    "lr_scheduler": ("training.lr_scheduler_type", "cosine"),
    "dataset_processes": ("training.dataset_num_proc", None),
    "gradient_checkpointing": ("training.gradient_checkpointing", False),
    "save_total_limit": ("training.save_total_limit", 4),
    "wandb_project": ("training.project", None),
    "trackio_project_name": ("training.project", None),
    "mlflow_experiment_name": ("training.project", None),
    "wandb_name": ("training.run_name", None),
    "trackio_run_name": ("training.run_name", None),
    "mlflow_run_name": ("training.run_name", None),
}
_TRACKERS = {
    "wandb": ("use_wandb", "wandb_project"),
    "mlflow": ("use_mlflow", "mlflow_tracking_uri", "mlflow_experiment_name"),
    "tensorboard": ("use_tensorboard",),
    "comet_ml": ("use_comet",),
    "trackio": ("use_trackio", "trackio_project_name"),
}
_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
}
# What a recipe does anyway, or what changes no result.
_NO_EFFECT = (
    "strict", "model_type", "tokenizer_type", "dataset_prepared_path", "pad_to_sequence_len",
    "qlora_sharded_model_loading",
    "is_llama_derived_model", "is_mistral_derived_model", "is_qwen_derived_model", "is_falcon_derived_model",
    "lora_on_cpu", "low_cpu_mem_usage", "dataset_keep_in_memory", "sample_packing_eff_est", "lora_mlp_kernel",
    "lora_qkv_kernel", "lora_o_kernel",
)  # fmt: skip
REASONS = {
    "wandb_entity": "set the variable WANDB_ENTITY",
    "wandb_mode": "set the variable WANDB_MODE",
    "wandb_watch": "call `wandb.watch(model)` in a script",
    "wandb_log_model": "weights are not uploaded to W&B: set training.push_to_hub",
    "mlflow_tracking_uri": "set the variable MLFLOW_TRACKING_URI",
    "unfrozen_parameters": "a recipe trains all weights or an adapter",
    "plugins": "they are parts of Axolotl",
    "lora_model_dir": "a recipe begins a new adapter",
    "loss_watchdog_threshold": "set training.nonfinite_policy for losses that are not finite",
    "loss_watchdog_patience": "belongs to loss_watchdog_threshold",
}
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


def convert(source: ForeignConfig, made: Conversion) -> None:
    """Convert all but the keys that the section `training` has under the same names."""
    for name, (dotted, default) in _KEYS.items():
        if (value := source.take(name, default)) is not None:
            made.put(dotted, value)
    if made.get("training.optim") == "adamw_torch_8bit":
        made.put("training.optim", "adamw_8bit")
    made.put(
        "training.per_device_eval_batch_size",
        source.take("eval_batch_size", source.take("micro_batch_size", 1)),
    )
    kind = source.take("adapter")
    adapts = kind in ("lora", "qlora")
    if kind and not adapts:
        made.lose(
            source, "adapter", "is not a kind of adapter that a recipe has; the adapter is a LoRA or none"
        )
    if adapts:
        put_adapter(made, source, {"target_modules": None}, rank="lora_r")
        if source.take("lora_target_linear", False):
            made.put("adapter.target_modules", "all-linear")
        for name in ("lora_r", "lora_alpha"):
            if name not in source.values:
                made.lose(source, name, "has no default in Axolotl; peft's is used")
    put_quantization(made, source, adapts)
    _precision(made, source, adapts)
    _attention(made, source)
    put_old_training_keys(made, source)
    put_early_stopping(made, source, "early_stopping_patience")
    _steps(made, source)
    _trackers(made, source)
    _tokens(made, source)
    _data(made, source)
    source.skip(_NO_EFFECT)


def _precision(made: Conversion, source: ForeignConfig, adapts: bool) -> None:
    """The weights are loaded in the dtype that is computed in."""
    half = bool(source.take("fp16", False) or source.take("float16", False))
    bf16 = source.take("bf16", None if half else "auto") in (True, "auto", "full") or bool(
        source.take("bfloat16", False)
    )
    source.skip(("float32",))
    made.put("training.bf16", bf16)
    if bf16:
        made.put("model.dtype", "bfloat16")
    elif half:
        made.put("training.fp16", True)
        # Weights of float16 cannot be trained themselves.
        made.put("model.dtype", "float16" if adapts else "float32")
    put_model_options(made, source, revision="revision_of_model")
    if made.get("quantization") == "nf4":
        made.lose(
            source,
            "bnb_config_kwargs",
            "scales are not quantized once more",
            "bnb_4bit_use_double_quant: true",
        )


def _attention(made: Conversion, source: ForeignConfig) -> None:
    for name, word in _ATTENTION.items():
        if source.take(name, False):
            made.put("training.model_init_kwargs.attn_implementation", word)


def _steps(made: Conversion, source: ForeignConfig) -> None:
    """When it warms up, evaluates and saves."""
    if source.take("warmup_steps") is not None:
        made.put("training.warmup_steps", source.take("warmup_steps"))
    elif made.get("training.warmup_steps") is None:
        made.put("training.warmup_steps", 0.03)
        made.lose(source, "warmup_steps", "the limit is not carried over", "3 % of all updates, at most 100")
    for what in ("eval", "save"):
        count, steps = source.take(f"{what}s_per_epoch"), source.take(f"{what}_steps")
        strategy = source.take(f"{what}_strategy", "epoch" if what == "save" else None)
        if steps:
            made.put(f"training.{what}_strategy", "steps")
            made.put(f"training.{what}_steps", steps)
        elif count:
            _times(made, source, what, count)
        elif strategy:
            made.put(f"training.{what}_strategy", strategy)
    if made.get("training.eval_strategy") not in (None, "no"):
        # As Axolotl, if it evaluates after a number of steps or by a strategy.
        made.put("training.eval_on_start", True)


def _times(made: Conversion, source: ForeignConfig, what: str, count: int) -> None:
    """So many times in each epoch: at its end, or each such share of all updates."""
    times = count * source.take("num_epochs", 1)
    made.put(f"training.{what}_strategy", "epoch")
    if count == 1:
        return
    if source.values.get("max_steps") or times <= 1:
        why = f"happens at the end of each epoch; set training.{what}_steps for other times"
        made.lose(source, f"{what}s_per_epoch", why)
        return
    made.put(f"training.{what}_strategy", "steps")
    made.put(f"training.{what}_steps", round(1 / times, 6))


def _trackers(made: Conversion, source: ForeignConfig) -> None:
    used = [name for name, signs in _TRACKERS.items() if any(source.values.get(sign) for sign in signs)]
    source.skip(name for signs in _TRACKERS.values() for name in signs if name.startswith("use_"))
    if used:
        made.put("training.report_to", used)


def _tokens(made: Conversion, source: ForeignConfig) -> None:
    tokens = ForeignConfig(source.take("special_tokens", {}), within="special_tokens.")
    if token := tokens.take("eos_token"):
        made.put("training.eos_token", token)
    reasons = {"pad_token": "padding has no loss, so the tokenizer's own serves"}
    made.lose_rest(
        tokens, {**dict.fromkeys(tokens.values, "tokens of the tokenizer are set in its folder"), **reasons}
    )


# --- data -------------------------------------------------------------------------------------------------------------


def _data(made: Conversion, source: ForeignConfig) -> None:
    all_inputs = bool(source.take("train_on_inputs", False))
    listed, test = (
        source.take("datasets") or source.take("pretraining_dataset") or [],
        source.take("test_datasets") or [],
    )
    found, held = (
        [_dataset(made, source, *item) for item in named_items(name, items)]
        for name, items in (("datasets", listed), ("test_datasets", test))
    )
    kept = put_training_data(made, found, source, "datasets")
    put_evaluation_data(made, held, source, "test_datasets", found)
    put_fraction(made, source, "val_set_size")
    if all_inputs:
        made.put("training.completion_only_loss", False)
    elif any(item.conversational for item in kept):
        made.put("training.assistant_only_loss", True)
    _template(made, source)


def _template(made: Conversion, source: ForeignConfig) -> None:
    """The chat template: that of the tokenizer, a file, or one that Axolotl has."""
    name, own = source.take("chat_template"), source.take("chat_template_jinja")
    if isinstance(own, str) and own.endswith((".jinja", ".j2")):
        made.put("training.chat_template_path", own)
    elif own or (name not in (None, "jinja") and not str(name).startswith("tokenizer_default")):
        why = "the chat template of the tokenizer is used; set training.chat_template_path to a file with another one"
        made.lose(source, "chat_template_jinja" if own else "chat_template", why)


def _dataset(made: Conversion, source: ForeignConfig, within: str, values: Any) -> Dataset:
    item = ForeignConfig(values if isinstance(values, Mapping) else {"path": values}, source.folder, within)
    files = item.take("data_files")
    path = files if isinstance(files, str) else str(item.take("path", ""))
    item.skip(("path", "ds_type", "trust_remote_code"))
    options: dict[str, Any] = {}
    if is_on_hub(path):
        options |= {"subset": item.take("name"), "split": item.take("split")}
    item.skip(("split",))  # a file is one split
    if isinstance(files, list):
        made.lose(item, "data_files", "name each file as a source of data.mixture")
    kind = item.take("type")
    options |= _prompts(made, item, kind)
    _conversation_keys(made, item)
    conversational = "chat_template" in str(kind) or "sharegpt" in str(kind)
    for name in ("chat_template", "chat_template_jinja"):
        if str(item.take(name, "tokenizer_default")).startswith("tokenizer_default"):
            continue
        made.lose(item, name, "set training.chat_template_path to a file with it")
    made.lose_rest(item, {})
    return Dataset(
        path, {name: value for name, value in options.items() if value}, conversational=conversational
    )


def _conversation_keys(made: Conversion, item: ForeignConfig) -> None:
    if item.take("roles_to_train", ["assistant"]) != ["assistant"]:
        made.lose(item, "roles_to_train", "the assistant's turns are trained on")
    if item.take("train_on_eos", "turn") != "turn":
        made.lose(item, "train_on_eos", "the end of each of the assistant's turns is trained on")


def _prompts(made: Conversion, item: ForeignConfig, kind: Any) -> dict[str, Any]:
    """How rows become text, as keys of `data`."""
    if isinstance(kind, Mapping):
        return _own_prompts(made, ForeignConfig(kind, within=f"{item.dotted('type')}."))
    if kind == "alpaca":
        return {"prompt_format": [ALPACA_WITH_INPUT, ALPACA], "completion_column": "output"}
    if kind in ("completion", "pretrain", None):
        return {"text_column": item.take("field", item.take("text_column"))}
    if "chat_template" in str(kind) or "sharegpt" in str(kind):
        return _conversations(item)
    made.lose(
        item,
        "type",
        "rows are recognised by their columns; set data.prompt_format and data.completion_column",
    )
    return {}


def _conversations(item: ForeignConfig) -> dict[str, Any]:
    names = item.take("message_property_mappings", {})
    role = names.get("role") or item.take("message_field_role", "role")
    content = names.get("content") or item.take("message_field_content", "content")
    roles = {theirs: ours for ours, listed in item.take("roles", {}).items() for theirs in listed}
    item.skip(("message_field_role", "message_field_content"))
    known = {theirs: ours for theirs, ours in roles.items() if _ROLES.get(theirs) != ours}
    options = messages_of(item.take("field_messages", "messages"), role, content, known)
    tools = item.take("field_tools", "tools")
    return options if tools == "tools" else {**options, "rename": {tools: "tools"}}


def _own_prompts(made: Conversion, kind: ForeignConfig) -> dict[str, Any]:
    """A type of the user's own: formats whose {instruction}, {input} and {system} are replaced by columns."""
    places = {name: kind.take(f"field_{name}") for name in ("instruction", "input", "system")}
    with_input, without = kind.take("format"), kind.take("no_input_format")
    if with_input and not without:
        without = with_input.replace("{input}", "")  # what a row without input is rendered as
    system, system_text = kind.take("system_format", "{system}"), kind.take("system_prompt", "")
    bodies = list(dict.fromkeys(text for text in (with_input, without) if text))
    if places["system"]:
        bodies = [f"{system}{body}" for body in bodies] + bodies
    elif system_text:
        bodies = [system.replace("{system}", _literal(system_text)) + body for body in bodies]
    for name, column in places.items():
        bodies = [body.replace(f"{{{name}}}", f"{{{column}}}" if column else "") for body in bodies]
    output = kind.take("field_output", "output")
    made.lose_rest(kind, {})
    if not bodies:
        return {"prompt_column": places["instruction"], "completion_column": output}
    return {"prompt_format": bodies, "completion_column": output}


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
