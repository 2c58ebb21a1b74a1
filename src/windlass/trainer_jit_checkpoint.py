"""Names that scripts import from here: saving when a scheduler asks a job to leave. They are refused, with reasons."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {"windlass.core.events": ("TrainerCallback",)})
