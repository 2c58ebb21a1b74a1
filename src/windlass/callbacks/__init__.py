"""Subscribers of a run's events. Scripts import them from here; they are loaded when they are first asked for."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
