"""Names that scripts import from here: models that are larger than one device."""

from windlass.utils.homes import names_of

__getattr__, __all__ = names_of(
    __name__,
    "windlass.compat.checkpoint_loading",
    "windlass.compat.auto_device_map",
    "windlass.compat.device_map",
    "windlass.compat.device_memory",
    "windlass.compat.moving",
    "windlass.compat.ties",
    "windlass.transforms.module_sizes",
    "windlass.transforms.module_tensors",
    "windlass.transforms.offload",
)
