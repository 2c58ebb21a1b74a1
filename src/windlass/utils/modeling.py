"""Re-exports of the old library: models that are larger than one device."""

from windlass.utils.homes import names_of

__getattr__, __all__ = names_of(
    __name__,
    "windlass.compat.checkpoint_loading",
    "windlass.compat.auto_device_map",
    "windlass.compat.device_map",
    "windlass.compat.device_memory",
    "windlass.compat.model_queries",
    "windlass.compat.moving",
    "windlass.compat.module_sizes",
    "windlass.compat.module_tensors",
    "windlass.config.quantities",
    "windlass.accelerator.offloaded_weights",
)
