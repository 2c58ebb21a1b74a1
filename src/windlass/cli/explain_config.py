"""What `windlass explain` says about a key of `model.config` or `base.config`, which transformers declares."""

from __future__ import annotations

import inspect
import re
from typing import Any

from windlass.cli.explanation import Explanation, as_text
from windlass.cli.recipe_draft import RecipeDraft
from windlass.cli.schema import Recipe
from windlass.config.nearest import did_you_mean
from windlass.core.errors import ConfigError, Problem
from windlass.core.optional import require

_SECTIONS = ("model.config", "base.config")
# `hidden_size (`int`, *optional*, defaults to `4096`):` and what follows it, to the next line that is not indented more
_ENTRY = (
    r"^(?P<indent> *){name} \((?P<type>[^\n]*?)(?:, \*optional\*.*)?\):?\n(?P<text>(?:(?P=indent) +\S.*\n?)+)"
)


def section_of(word: str) -> str | None:
    """Return the section whose keys transformers declares, if `word` is one of these keys; else None."""
    section, _, name = word.rpartition(".")
    return section if section in _SECTIONS and name else None


def explain_config(word: str, recipe: Recipe, draft: RecipeDraft) -> Explanation:
    """Explain a key of the config of a new model, of the type that `recipe` names. Raises ConfigError if the recipe has
    no such section, or the model no such key.
    """
    from windlass.cli.modelling import DERIVED, IMPLIED, base_config, config_class, config_keywords

    section, _, name = word.rpartition(".")
    given: dict[str, Any] | None = recipe.model.config
    if section == "base.config":
        given = None if recipe.base is None else base_config(recipe.base.config)
    if given is None:
        fix = "the recipe has no such section; name one that has: --recipe FILE"
        raise ConfigError(Problem("NAME", word, fix))
    kind = config_class(require("transformers", "explain a model's config"), given["model_type"], section)
    known = config_keywords(kind)
    if name not in known and name != "model_type":
        fix = f"{given['model_type']} has no such setting{did_you_mean(name, sorted(known))}"
        raise ConfigError(Problem("NAME", word, fix))
    is_taken = name in (*DERIVED, *IMPLIED)
    default = None if is_taken else _default(kind, name)
    said = Explanation(word, given.get(name, default))
    origin = draft.origin(*section.split("."), name)
    unset = "tokenizer and data" if is_taken else "its default"
    said.add("from", origin or unset)
    if name in given:
        said.add("default", unset if is_taken else as_text(default))
    entry = re.search(_ENTRY.format(name=re.escape(name)), f"{kind.__doc__ or ''}\n", re.MULTILINE)
    if entry:
        said.add("means", " ".join(entry["text"].split()))
        said.add("type", entry["type"].replace("`", ""))
    said.add("model", given["model_type"])
    said.add("python", f"transformers.{kind.__name__}.{name}")
    said.add("recipe", word)
    said.add("page", ["docs/recipes.md"])
    return said


def _default(kind: Any, name: str) -> Any:
    """Return the default of a key in a config class; None if it depends on others."""
    parameter = inspect.signature(kind.__init__).parameters.get(kind.attribute_map.get(name, name))
    default = None if parameter is None else parameter.default
    return default if isinstance(default, bool | int | float | str | list) else None
