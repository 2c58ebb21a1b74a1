"""`windlass train --tiny`: a recipe shrunk, so that it runs on any machine in seconds.

Everything that the command line sets itself stays. The rest of the rule is in these tables, and in docs/recipes.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields

from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.optional import require
from windlass.recipes.built_in_recipes import ROWS
from windlass.recipes.modelling import config_class, config_keywords, config_of_named
from windlass.recipes.recipe_draft import RecipeDraft
from windlass.recipes.schema import Recipe
from windlass.recipes.task import Task
from windlass.recipes.tasks import TASKS

logger = get_job_logger(__name__)

# Sizes of a model, under the names that configurations have for them; smaller ones stay.
_MODEL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 64),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "d_ff", "n_inner"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
}
# The most that keys of other sections are; values below it stay.
_MOST = {
    "data": {"max_samples": 48, "block_size": 64, "max_length": 64, "eval_rows": 8},
    "base": {"block_size": 256, "max_steps": 2, "batch_size": 4},
    "sample": {"max_new_tokens": 16},
    "training": {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_length": 256,  # a row of Alpaca has its completion after more than 64 tokens
    },
}
_SET = {"use_cpu": True, "logging_steps": 1, "eval_steps": 2, "save_steps": 2, "report_to": "none"}
# Of the training section: for a GPU, for a long run, or for the world outside.
_LEFT_OUT = (
    "num_train_epochs", "global_batch_size", "dataloader_num_workers", "torch_compile", "use_liger_kernel", "tf32",
    "fp16", "fp8", "push_to_hub", "resume_from_checkpoint",
)  # fmt: skip
_STRATEGIES = ("eval_strategy", "save_strategy", "logging_strategy")
# Keys of data that stay when its rows are replaced.
_OF_SAMPLES = ("block_size", "max_length", "mlm_probability", "streaming", "eval_rows", "max_samples")
_LEAST_HELD_OUT = 0.05  # of 48 rows, two
_VOCABULARY = 300


def shrink(draft: RecipeDraft) -> None:
    """Replace values of a recipe by those of a tiny run: model, tokenizer, data and training. They must have the types
    that a recipe asks for. Raises ConfigError if the kind of a named model is not known.
    """
    task = TASKS[draft.values.get("task", Recipe().task)]
    _shrink_model(draft, task)
    _shrink_data(draft, task)
    for section, key, most in _most(draft, task):
        now = draft.section(section).get(key)
        draft.amend((section, key), min(now, most) if isinstance(now, int) and now > 0 else most)
    _shrink_training(draft)


def _shrink_model(draft: RecipeDraft, task: Task) -> None:
    """Put a model with random weights and a tokenizer of the data in place of named ones."""
    model = draft.section("model")
    if name := model.get("name"):
        kind = str(model.get("model_type") or _type_of(name))
        logger.warning("--tiny: a small %s with random weights in place of %s", kind, name)
        known = config_keywords(
            config_class(require("transformers", "run a recipe"), kind, "model.model_type")
        )
        sizes = {key: size for key, size in _MODEL.items() if key in known}
        for key in ("name", "model_type"):
            model.pop(key, None)
        for key in ("eos_token", "pad_token"):  # of the tokenizer that is replaced
            if not draft.is_overridden("training", key):
                draft.section("training").pop(key, None)
        draft.amend((task.new_model, "config"), {"model_type": kind, **sizes})
    for section in ("model", "base"):
        for key, value in (draft.section(section).get("config") or {}).items():
            if key in _MODEL and isinstance(value, int):
                draft.amend((section, "config", key), min(value, _MODEL[key]))
    if task.reads_text:
        draft.section("tokenizer").pop("name", None)
        draft.amend(("tokenizer", "train", "vocab_size"), _VOCABULARY)


def _type_of(name: str) -> str:
    try:
        return str(config_of_named(name).model_type)
    except ModelError as error:
        fix = "its type is needed, and cannot be read here: set model.model_type, such as llama or qwen3"
        raise ConfigError(Problem("model.name", name, fix)) from error


def _shrink_data(draft: RecipeDraft, task: Task) -> None:
    """Put rows of this package in place of data that is not in a file here, unless the command line names it."""
    data = draft.section("data")
    named = [*(data.get("mixture") or ()), *(data[key] for key in ("train", "eval", "test") if data.get(key))]
    is_here = data.get("format") != "hub" and all(os.path.exists(str(source)) for source in named)
    if not is_here and not any(draft.is_overridden("data", key) for key in ("train", "mixture")):
        logger.warning("--tiny: rows made for it in place of %s", ", ".join(map(str, named)))
        kept = {key: data[key] for key in _OF_SAMPLES if key in data}
        tested = {"test": str(ROWS)} if data.get("test") else {}
        draft.amend(("data",), {**kept, **task.stand_in(data), **tested})
    held = draft.section("data").get("eval_fraction", _LEAST_HELD_OUT)
    if isinstance(held, float) and 0 < held < _LEAST_HELD_OUT:
        draft.amend(("data", "eval_fraction"), _LEAST_HELD_OUT)


def _most(draft: RecipeDraft, task: Task) -> Iterator[tuple[str, str, int]]:
    """Yield section, key and limit of what this recipe has."""
    own = {key for other in TASKS.values() for key in other.own_keys} - set(task.own_keys)
    for section, limits in _MOST.items():
        for key, most in limits.items():
            missing = key == "eval_rows" and not draft.section("data").get("streaming")
            foreign = section == "training" and key not in {item.name for item in fields(task.arguments)}
            if not missing and not foreign and not own & {section, f"{section}.{key}"}:
                yield section, key, most


def _shrink_training(draft: RecipeDraft) -> None:
    training = draft.section("training")
    for key in _LEFT_OUT:
        if not draft.is_overridden("training", key):
            training.pop(key, None)
    if isinstance(options := training.get("model_init_kwargs"), dict):
        options.pop("attn_implementation", None)  # such as flash_attention_2, which needs a GPU
    for key in _STRATEGIES:
        if training.get(key) == "epoch":
            draft.amend(("training", key), "steps")
    if any(part in str(training.get("optim", "")) for part in ("bit", "paged")):  # of bitsandbytes, for a GPU
        draft.amend(("training", "optim"), "adamw_torch")
    for key, value in _SET.items():
        draft.amend(("training", key), value)
    draft.amend(("training", "output_dir"), f"{training['output_dir']}-tiny")
