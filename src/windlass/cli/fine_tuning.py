"""The task sft of a recipe: the small base that is trained first, the adapter, the trainer."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from windlass.checkpoint.adapters import peft_library
from windlass.checkpoint.files import Files
from windlass.cli.modelling import build_model
from windlass.cli.samples import pack
from windlass.cli.schema import BaseSpec, ModelSpec, Recipe
from windlass.cli.tuning_data import Rows, tuning_texts
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.optional import require
from windlass.core.rng import set_seed
from windlass.core.world import world_from_environment
from windlass.data.collate_default import default_data_collator

logger = get_job_logger(__name__)

FOLDER = "base"
_SETTINGS = "base_recipe.json"
_SMALL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "initializer_range": 0.06,
}  # fmt: skip


def build_sft_trainer(recipe: Recipe, tokenizer: Any, train: Any, evaluation: Any, args: Any) -> Any:
    """Return an `SFTTrainer` for the recipe's model, or for a base that is trained now, unless it was before."""
    from windlass.finetuning.sft_trainer import SFTTrainer

    name = recipe.model.name
    if name is None:
        name = str(_trained_base(recipe, tokenizer, train, args))
    args.model_init_kwargs = {"dtype": recipe.model.dtype, **(args.model_init_kwargs or {})}
    return SFTTrainer(
        name, args, train_dataset=train, eval_dataset=evaluation, processing_class=tokenizer,
        peft_config=_adapter(recipe), quantization_config=_quantization(recipe),
    )  # fmt: skip


def _adapter(recipe: Recipe) -> Any:
    if recipe.adapter is None:
        return None
    peft = peft_library("train an adapter")
    try:
        return peft.LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": "all-linear", **recipe.adapter})
    except (TypeError, ValueError) as error:
        raise ConfigError(Problem("adapter", recipe.adapter, str(error))) from error


def _quantization(recipe: Recipe) -> Any:
    if recipe.quantization is None:
        return None
    transformers = require("transformers", "quantize a model")
    if recipe.quantization == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=recipe.quantization, bnb_4bit_compute_dtype=recipe.model.dtype
    )


# --- the base ---------------------------------------------------------------------------------------------------------


def _trained_base(recipe: Recipe, tokenizer: Any, rows: Rows, args: Any) -> Path:
    """Return the folder of a small model that is trained on the rows' texts, unless one with these settings exists."""
    from windlass.trainer.trainer import Trainer

    spec = recipe.base or BaseSpec()
    folder = Path(args.output_path) / FOLDER
    settings = json.dumps(
        {**asdict(spec), "data": asdict(recipe.data), "vocabulary": len(tokenizer)}, sort_keys=True
    )
    found = folder / _SETTINGS
    if (
        found.is_file() and found.read_text(encoding="utf-8") == settings
    ):  # written last: the folder is complete
        return folder
    logger.warning(
        "no model is named: first training a small base on the same text, for %d updates", spec.max_steps
    )
    kind = spec.config.get("model_type", _SMALL["model_type"])
    config = {**(_SMALL if kind == _SMALL["model_type"] else {}), **spec.config}
    model_recipe = replace(
        recipe, task="causal-lm", model=ModelSpec(config=config),
        data=replace(recipe.data, block_size=spec.block_size),
    )  # fmt: skip
    set_seed(args.seed)
    base_args = TrainingArguments(
        str(folder), max_steps=spec.max_steps, per_device_train_batch_size=spec.batch_size,
        learning_rate=spec.learning_rate, lr_scheduler_type="cosine", warmup_steps=0.05, weight_decay=0.1,
        logging_steps=50, save_strategy="no", seed=args.seed, use_cpu=args.use_cpu, report_to="none",
        disable_tqdm=args.disable_tqdm, log_level="warning",
    )  # fmt: skip
    trainer = Trainer(
        build_model(model_recipe, tokenizer, []), base_args, default_data_collator,
        pack(list(tuning_texts(rows, recipe.data.text_column)), tokenizer, spec.block_size), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    if world_from_environment().is_main:
        Files().write(found, [settings.encode()])
    trainer.accelerator.wait_for_everyone()
    return folder
