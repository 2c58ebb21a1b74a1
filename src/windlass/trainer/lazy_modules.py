"""The modules that a Trainer uses, imported at their first use.

A script that prints its help, or that only reads arguments, does not need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.core.lazy import LazyModule

if TYPE_CHECKING:
    from windlass.callbacks import handler as handler
    from windlass.data import columns as columns
    from windlass.metrics import evaluation as evaluation
    from windlass.trainer import batch_rows as batch_rows
    from windlass.trainer import card as card
    from windlass.trainer import defaults as defaults
    from windlass.trainer import evaluator as evaluator
    from windlass.trainer import hooks as hooks
    from windlass.trainer import instead as instead
    from windlass.trainer import interruption as interruption
    from windlass.trainer import loading as loading
    from windlass.trainer import memory_stages as memory_stages
    from windlass.trainer import model_writer as model_writer
    from windlass.trainer import optimization as optimization
    from windlass.trainer import overview as overview
    from windlass.trainer import plans as plans
    from windlass.trainer import preparation as preparation
    from windlass.trainer import publishing as publishing
    from windlass.trainer import reports as reports
    from windlass.trainer import run_folder as run_folder
    from windlass.trainer import run_training as run_training
    from windlass.trainer import services as services
    from windlass.trainer import session as session
else:
    _ELSEWHERE = {"handler": "callbacks", "columns": "data", "evaluation": "metrics"}

    def __getattr__(name: str) -> LazyModule:
        if name.startswith("_"):  # what the import system asks a module for
            raise AttributeError(name)
        return LazyModule(f"windlass.{_ELSEWHERE.get(name, 'trainer')}.{name}")
