"""The model of a run: new from a config, or loaded by name."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windlass.core.activity import looking_for
from windlass.core.errors import ConfigError, Problem, did_you_mean, first_line, refuse
from windlass.core.locations import loading
from windlass.core.optional import require
from windlass.recipes.schema import ModelSpec

# Determined by the data of the recipe.
_DERIVED = ("num_labels", "id2label", "label2id")
# The base of a fine-tuning that names no model.
_SMALL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    # Twice the default of `base.block_size`: rows of the tuning may be longer.
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
}


@dataclass(frozen=True, slots=True)
class TextShape:
    """What a language model reads."""

    tokenizer: Any  # makes its ids
    length: int  # most tokens of a sample
    key: str  # dotted key of the recipe with that length, for errors

    def implied_config(self) -> dict[str, Any]:
        """Return the defaults of a new model's config."""
        return {
            "vocab_size": len(self.tokenizer),
            "max_position_embeddings": self.length,
            "pad_token_id": self.tokenizer.pad_token_id,
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
        }

    def check(self, config: Any) -> None:
        """Raise ConfigError if a model with `config` has too few embeddings or positions."""
        problems, entries = [], len(self.tokenizer)
        if getattr(config, "vocab_size", entries) < entries:
            fix = f"the tokenizer has {entries} entries; leave it out or give at least that"
            problems.append(Problem("model.config.vocab_size", config.vocab_size, fix))
        most = getattr(config, "max_position_embeddings", None)
        if most is not None and self.length > most:
            fix = f"the model has {most} positions (max_position_embeddings)"
            problems.append(Problem(self.key, self.length, fix))
        refuse(problems)


def build_model(
    spec: ModelSpec,
    auto_class: str,
    labels: Sequence[str],
    implied: dict[str, Any],
    text: TextShape | None = None,
) -> Any:
    """Return a `PreTrainedModel` on the CPU; new weights are drawn from the current default generator.

    Args:
        auto_class: the class of transformers that loads or builds it.
        labels: names of the classes, in the order of their ids; empty without classes.
        implied: defaults of a new model's config that follow from the data, besides those that follow from `text`.
        text: what a language model reads; None for images.

    Raises:
        ConfigError: unknown or impossible keys in `model.config`, all at once.
        ModelError: a named model that cannot be loaded.
    """
    auto = getattr(require("transformers", "run a recipe"), auto_class)
    torch_dtype = getattr(require("torch", "train"), spec.dtype)
    head = _head(labels)
    if spec.name is not None:
        check_model_type(spec)
        with loading("model", spec.name):
            model = auto.from_pretrained(spec.name, **head, dtype=torch_dtype)
        if text is not None:
            text.check(model.config)
        return model
    assert spec.config is not None  # a task asks for one of the two
    of_text = {} if text is None else text.implied_config()
    config = config_of(spec.config, {**of_text, **implied, **head})
    if text is not None:
        text.check(config)
    try:
        return auto.from_config(config, dtype=torch_dtype)
    except ValueError as error:
        reason = first_line(error)
        fix = f"cannot be built for this task ({auto_class}): {reason}"
        raise ConfigError(Problem("model.config", spec.config, fix)) from error


def check_model_type(spec: ModelSpec) -> None:
    """Raise ConfigError if the named model has another type than the recipe says, ModelError if it has no config."""
    if spec.name is None or spec.model_type is None:
        return
    found = config_of_named(spec.name).model_type
    if found != spec.model_type:
        raise ConfigError(Problem("model.model_type", spec.model_type, f"{spec.name} is of type {found}"))


def config_of_named(name: str) -> Any:
    """Return the config of a named model. Raises ModelError if it cannot be read."""
    transformers = require("transformers", "run a recipe")
    with loading("config of the model", name), looking_for(name):
        return transformers.AutoConfig.from_pretrained(name)


def writing_fault(config: Any) -> str | None:
    """Why a model with `config` cannot learn to write the next token of a text; None if it can."""
    transformers = require("transformers", "run a recipe")
    writers = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not any(type(config) in mapping for mapping in writers):
        return "transformers has no model of this type that writes text from left to right; choose another type or task"
    encodes = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    # transformers warns, and trains it: what is to be predicted is among what is read.
    if encodes and getattr(config, "is_decoder", None) is False:
        return (
            "is an encoder, whose tokens see those after them, so that it cannot learn to predict the next one: set "
            "task: masked-lm, or is_decoder: true in its config"
        )
    return None


def _head(labels: Sequence[str]) -> dict[str, Any]:
    if not labels:
        return {}
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {name: index for index, name in enumerate(labels)},
    }


def base_config(of_recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the whole config of a base that is trained first: that of a small llama, unless it is another model."""
    kind = of_recipe.get("model_type", _SMALL["model_type"])
    return {**(_SMALL if kind == _SMALL["model_type"] else {}), **of_recipe}


def config_of(of_recipe: dict[str, Any], implied: dict[str, Any], section: str = "model.config") -> Any:
    """Return the config of a new model: `of_recipe`, with `implied` as defaults. Raises ConfigError for unknown or
    impossible keys, all at once. `section`: dotted key of `of_recipe` in the recipe, for errors.
    """
    transformers = require("transformers", "run a recipe")
    given = dict(of_recipe)
    model_type = given.pop("model_type")
    kind = config_class(transformers, model_type, section)
    known = config_keywords(kind)
    no_such = f"{model_type} has no such setting"
    faults = {key: f"{no_such}{did_you_mean(key, sorted(known))}" for key in given if key not in known}
    faults |= {key: "is taken from the data; leave it out" for key in _DERIVED if key in given}
    refuse(Problem(f"{section}.{key}", given[key], fix) for key, fix in faults.items())
    # Families have other settings; those of the recipe were checked above, and must not vanish so. All that have a
    # decoder know where it begins, also T5, whose class does not list it.
    implied = {k: value for k, value in implied.items() if k in known or k == "decoder_start_token_id"}
    try:
        return kind(**{**implied, **given})
    except Exception as error:  # strict config classes raise types of their own
        reason = " ".join(str(error).split())
        raise ConfigError(Problem(section, of_recipe, reason)) from error


def config_class(transformers: Any, model_type: str, section: str) -> Any:
    mapping = transformers.CONFIG_MAPPING
    if model_type not in mapping:
        fix = f"transformers has no such model{did_you_mean(model_type, mapping)}"
        raise ConfigError(Problem(f"{section}.model_type", model_type, fix))
    return mapping[model_type]


def config_keywords(kind: Any) -> set[str]:
    """Return the keys of a config class, whose constructor would accept any other key silently."""
    names = set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map) | set(_DERIVED)
    return names - {"self", "kwargs"}
