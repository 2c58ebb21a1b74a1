"""Names that scripts import from here: saving when a scheduler asks a job to leave. They are refused, with reasons."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
