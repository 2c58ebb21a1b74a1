"""The model of a run: new from a config, or loaded by name."""

from __future__ import annotations

import inspect
from typing import Any

from windlass.cli.checks import PLAIN_TEXT
from windlass.cli.schema import Recipe
from windlass.config.nearest import did_you_mean
from windlass.config.refusal import refuse
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.optional import require

# Determined by the data of the recipe.
DERIVED = ("num_labels", "id2label", "label2id")
AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}


def build_model(
    recipe: Recipe, tokenizer: Any, labels: list[str], image_shape: tuple[int, int, int] | None = None
) -> Any:
    """Return a `PreTrainedModel` on the CPU; new weights are drawn from the current default generator.

    Args:
        tokenizer: None for images.
        labels: names of the classes, in the order of their ids; empty for a language model.
        image_shape: channels, height and width of the images; None for text.

    Raises:
        ConfigError: unknown or impossible keys in `model.config`, all at once.
        ModelError: a named model that cannot be loaded.
    """
    transformers = require("transformers", "run a recipe")
    auto = getattr(transformers, AUTO_CLASSES[recipe.task])
    torch_dtype = getattr(require("torch", "train"), recipe.model.dtype)
    head = _head(labels)
    implied = _of_text(recipe, tokenizer) if image_shape is None else _of_images(image_shape)
    if recipe.model.name is not None:
        model = _loaded(auto, recipe.model.name, {**head, "dtype": torch_dtype})
        _check_against_tokens(recipe, model.config, tokenizer)
        return model
    assert recipe.model.config is not None  # `checks.py` asks for one of the two
    config = _config(recipe, tokenizer, head, implied)
    try:
        return auto.from_config(config, dtype=torch_dtype)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        fix = f"cannot be built for {recipe.task}: {reason}"
        raise ConfigError(Problem("model.config", recipe.model.config, fix)) from error


def _head(labels: list[str]) -> dict[str, Any]:
    if not labels:
        return {}
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {name: index for index, name in enumerate(labels)},
    }


def _loaded(auto: Any, name: str, options: dict[str, Any]) -> Any:
    try:
        return auto.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ModelError(f"the model {name!r} cannot be loaded: {error}") from error


def _config(recipe: Recipe, tokenizer: Any, head: dict[str, Any], implied: dict[str, Any]) -> Any:
    transformers = require("transformers", "run a recipe")
    given = dict(recipe.model.config or {})
    model_type = given.pop("model_type")
    kind = _config_class(transformers, model_type)
    known = _keywords(kind)
    no_such = f"{model_type} has no such setting"
    faults = {key: f"{no_such}{did_you_mean(key, sorted(known))}" for key in given if key not in known}
    faults |= {key: "is taken from the data; leave it out" for key in DERIVED if key in given}
    refuse(Problem(f"model.config.{key}", given[key], fix) for key, fix in faults.items())
    implied = {key: value for key, value in implied.items() if key in known}
    try:
        config = kind(**{**implied, **head, **given})
    except Exception as error:  # strict config classes raise types of their own
        reason = " ".join(str(error).split())
        raise ConfigError(Problem("model.config", recipe.model.config, reason)) from error
    _check_against_tokens(recipe, config, tokenizer)
    return config


def _config_class(transformers: Any, model_type: str) -> Any:
    mapping = transformers.CONFIG_MAPPING
    if model_type not in mapping:
        fix = f"transformers has no such model{did_you_mean(model_type, mapping)}"
        raise ConfigError(Problem("model.config.model_type", model_type, fix))
    return mapping[model_type]


def _keywords(kind: Any) -> set[str]:
    """Return the keys of a config class, whose constructor would accept any other key silently."""
    names = set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map) | set(DERIVED)
    return names - {"self", "kwargs"}


def _of_text(recipe: Recipe, tokenizer: Any) -> dict[str, Any]:
    """Return the defaults that follow from tokenizer and data."""
    length = getattr(recipe.data, _length_key(recipe))
    implied = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": length,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if recipe.task == "seq2seq":
        implied |= {"decoder_start_token_id": tokenizer.pad_token_id, "forced_eos_token_id": None}
    return implied


def _of_images(shape: tuple[int, int, int]) -> dict[str, Any]:
    channels, height, width = shape
    return {"num_channels": channels, "image_size": height if height == width else [height, width]}


def _length_key(recipe: Recipe) -> str:
    return "block_size" if recipe.task in PLAIN_TEXT else "max_length"


def _check_against_tokens(recipe: Recipe, config: Any, tokenizer: Any) -> None:
    if tokenizer is None:
        return
    problems = []
    if getattr(config, "vocab_size", len(tokenizer)) < len(tokenizer):
        fix = f"the tokenizer has {len(tokenizer)} entries; leave it out or give at least that"
        problems.append(Problem("model.config.vocab_size", config.vocab_size, fix))
    key = _length_key(recipe)
    length, most = getattr(recipe.data, key), getattr(config, "max_position_embeddings", None)
    if most is not None and length > most:
        fix = f"the model has {most} positions (max_position_embeddings)"
        problems.append(Problem(f"data.{key}", length, fix))
    refuse(problems)
