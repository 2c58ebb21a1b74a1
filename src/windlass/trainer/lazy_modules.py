"""The modules that a Trainer uses, imported at their first use: a script that is run with `--help`, or that only reads
arguments, does not wait for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.core.lazy import LazyModule

if TYPE_CHECKING:
    import windlass.trainer.hooks as binding
    import windlass.trainer.inputs as loading
    import windlass.trainer.interruption as interrupting
    from windlass.assemble import resolve
    from windlass.data import columns
    from windlass.metrics import evaluation
    from windlass.trainer import (
        card,
        defaults,
        evaluator,
        model_writer,
        optimization,
        preparation,
        publishing,
        run_folder,
        services,
    )
else:
    binding = LazyModule("windlass.trainer.hooks")
    card = LazyModule("windlass.trainer.card")
    columns = LazyModule("windlass.data.columns")
    defaults = LazyModule("windlass.trainer.defaults")
    evaluation = LazyModule("windlass.metrics.evaluation")
    evaluator = LazyModule("windlass.trainer.evaluator")
    interrupting = LazyModule("windlass.trainer.interruption")
    loading = LazyModule("windlass.trainer.inputs")
    model_writer = LazyModule("windlass.trainer.model_writer")
    optimization = LazyModule("windlass.trainer.optimization")
    preparation = LazyModule("windlass.trainer.preparation")
    publishing = LazyModule("windlass.trainer.publishing")
    resolve = LazyModule("windlass.assemble.resolve")
    run_folder = LazyModule("windlass.trainer.run_folder")
    services = LazyModule("windlass.trainer.services")

__all__ = [
    "binding", "card", "columns", "defaults", "evaluation", "evaluator", "interrupting", "loading", "model_writer",
    "optimization", "preparation", "publishing", "resolve", "run_folder", "services",
]  # fmt: skip
