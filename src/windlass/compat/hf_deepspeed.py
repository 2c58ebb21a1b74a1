"""Models of transformers divided while they are built, by a script that makes the setting of transformers itself."""

from __future__ import annotations

from typing import Any

from windlass.core.optional import require
from windlass.zero.library import load_library


class HfDeepSpeedConfig:
    """Models of transformers are divided among ranks for as long as the object lives, which is one of transformers.

    DeepSpeed then starts when the first model is built, before any run. Here it gets the settings that a run gives it.

    Args:
        config_file_or_dict: a DeepSpeed configuration.
    """

    def __new__(cls, config_file_or_dict: Any) -> Any:
        load_library()
        integration = require("transformers.integrations.deepspeed", "divide models while they are built")
        return integration.HfDeepSpeedConfig(config_file_or_dict)
