"""Supervised fine-tuning on images by a recipe: the processor of a named model, or a small new model with one."""

from __future__ import annotations

from typing import Any

from windlass.core.activity import looking_for
from windlass.core.errors import ConfigError, Problem
from windlass.core.locations import loading
from windlass.core.optional import require
from windlass.core.rng import set_seed
from windlass.recipes.modelling import config_class
from windlass.recipes.schema import BaseSpec, Recipe

_NEW, _TOKEN = "llava", "<image>"
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + _TOKEN + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def image_model(recipe: Recipe, tokenizer: Any, seed: int) -> tuple[Any, Any]:
    """Return the model, or its name, and the processor of a recipe on images; `tokenizer` and `seed` are those of a new
    model. Raises ConfigError or ModelError if the model has no processor, or a new one cannot be built.
    """
    name = recipe.model.name
    if name is None:
        return _new_model((recipe.base or BaseSpec()).config, tokenizer, seed)
    transformers = require("transformers", "train on images")
    with loading("processor of", name), looking_for(name):
        return name, transformers.AutoProcessor.from_pretrained(name)


def _new_model(config: dict[str, Any], tokenizer: Any, seed: int) -> tuple[Any, Any]:
    """A small LLaVA with new weights, and its processor."""
    transformers = require("transformers", "train on images")
    if config.get("model_type") != _NEW:
        fix = f"a new model that sees images is a {_NEW!r}; set it, or name a model (model.name)"
        raise ConfigError(Problem("base.config.model_type", config.get("model_type"), fix))
    tokenizer.add_special_tokens({"additional_special_tokens": [_TOKEN]})
    sizes = {key: value for key, value in config.items() if key != "model_type"}
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    text = {"model_type": "llama", "vocab_size": len(tokenizer), **ids, **sizes.pop("text_config", {})}
    vision = {"model_type": "clip_vision_model", **sizes.pop("vision_config", {})}
    made = {"image_token_id": tokenizer.convert_tokens_to_ids(_TOKEN), "vision_feature_layer": -1}
    try:
        whole = config_class(transformers, _NEW, "base.config")(
            **{**made, "text_config": text, "vision_config": vision, **sizes}
        )
        set_seed(seed)
        model = transformers.LlavaForConditionalGeneration(whole)
    except Exception as error:  # strict config classes raise types of their own
        raise ConfigError(Problem("base.config", config, " ".join(str(error).split()))) from error
    sees = whole.vision_config
    side = {"height": sees.image_size, "width": sees.image_size}
    images = transformers.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(
        size=side, crop_size=side
    )
    processor = transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=sees.patch_size,
        vision_feature_select_strategy=whole.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )
    return model, processor
