"""Names that scripts import from here: tensors, samplers and reports of a Trainer, loaded when they are asked for."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
