"""The modules that a Trainer uses, imported at their first use.

A script that prints its help, or that only reads arguments, does not need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.core.lazy import LazyModule

if TYPE_CHECKING:
    from windlass.callbacks import handler
    from windlass.data import columns
    from windlass.metrics import evaluation
    from windlass.trainer import (
        card,
        defaults,
        evaluator,
        hooks,
        inputs,
        interruption,
        model_writer,
        optimization,
        overview,
        plans,
        preparation,
        publishing,
        reports,
        run_folder,
        services,
        session,
    )
else:
    card = LazyModule("windlass.trainer.card")
    columns = LazyModule("windlass.data.columns")
    defaults = LazyModule("windlass.trainer.defaults")
    evaluation = LazyModule("windlass.metrics.evaluation")
    evaluator = LazyModule("windlass.trainer.evaluator")
    handler = LazyModule("windlass.callbacks.handler")
    hooks = LazyModule("windlass.trainer.hooks")
    inputs = LazyModule("windlass.trainer.inputs")
    interruption = LazyModule("windlass.trainer.interruption")
    model_writer = LazyModule("windlass.trainer.model_writer")
    optimization = LazyModule("windlass.trainer.optimization")
    overview = LazyModule("windlass.trainer.overview")
    plans = LazyModule("windlass.trainer.plans")
    preparation = LazyModule("windlass.trainer.preparation")
    publishing = LazyModule("windlass.trainer.publishing")
    reports = LazyModule("windlass.trainer.reports")
    run_folder = LazyModule("windlass.trainer.run_folder")
    services = LazyModule("windlass.trainer.services")
    session = LazyModule("windlass.trainer.session")

__all__ = [
    "card",
    "columns",
    "defaults",
    "evaluation",
    "evaluator",
    "handler",
    "hooks",
    "inputs",
    "interruption",
    "model_writer",
    "optimization",
    "overview",
    "plans",
    "preparation",
    "publishing",
    "reports",
    "run_folder",
    "services",
    "session",
]
