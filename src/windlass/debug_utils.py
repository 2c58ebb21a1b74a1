"""Names that scripts import from here: the search for values that are not finite, loaded when it is asked for."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.config.enums": ("DebugOption",),
    "windlass.transforms.overflow_watch": ("DebugUnderflowOverflow",),
})  # fmt: skip
