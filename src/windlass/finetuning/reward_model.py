"""The model of a `RewardTrainer`: a sequence classifier with one label."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.optional import require
from windlass.finetuning.base_model import load_model, load_options
from windlass.finetuning.tuned_model import receives_weights
from windlass.finetuning.tuning_config import TuningConfig
from windlass.trainer.defaults import seed_all

logger = get_job_logger(__name__)
_PURPOSE = "train a reward model"
_HEADS = ("score", "classifier")


def reward_model(
    model: Any, args: TuningConfig, quantization_config: Any, peft_config: Any
) -> tuple[nn.Module, Any]:
    """Return the model, and the adapter's configuration with the head among what is trained. Seeds all random
    generators.

    Args:
        model: a classifier; its name, folder or config.

    Raises:
        ConfigError: it has more than one label.
        ModelError: it cannot be loaded.
    """
    seed_all(args)  # a new head is drawn from these generators
    opened = _opened(model, args, quantization_config)
    labels = getattr(getattr(opened, "config", None), "num_labels", 1)
    if labels != 1:
        fix = "a reward is one number: load the model with num_labels=1"
        raise ConfigError(Problem("model.config.num_labels", labels, fix))
    if peft_config is None:
        return opened, None
    heads = [name for name in _HEADS if hasattr(opened, name)]
    adapter = copy.copy(peft_config)
    saved = list(getattr(adapter, "modules_to_save", None) or ())
    if heads and not set(heads) & set(saved):
        logger.info("the head %r is trained beside the adapter", heads[0])
        adapter.modules_to_save = [*saved, *heads]
    return opened, adapter


def _opened(model: Any, args: TuningConfig, quantization_config: Any) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    transformers = require("transformers", _PURPOSE)
    kind = transformers.AutoModelForSequenceClassification
    if isinstance(model, transformers.PreTrainedConfig):
        config = copy.deepcopy(model)
        config.num_labels = 1
        built: nn.Module = kind.from_config(config, dtype=torch.float32)
        return built
    if not isinstance(model, str):
        fix = "give a model, its name or folder, or a config of transformers"
        raise ConfigError(Problem("model", type(model).__name__, fix))
    return load_model(model, load_options(args, quantization_config), receives_weights(args), labels=1)
