"""Re-exports of the old library: configuration objects and enums."""

from windlass.utils.homes import names_of

__getattr__, __all__ = names_of(
    __name__, "windlass.config.plugins", "windlass.config.plugin_base", "windlass.config.plugin_engines",
    "windlass.config.plugin_fsdp", "windlass.config.plugin_parallelism", "windlass.config.plugin_words",
)  # fmt: skip
