"""Names that scripts import from here: how a Trainer chooses its optimizer, loaded when they are first asked for."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.compat.model_queries": (
        "check_target_module_exists",
        "has_mixed_dtensor",
        "is_optimizer_factory",
    ),
    "windlass.config.enums": ("OptimizerNames", "ParallelMode"),
    "windlass.optim.optimizers.adafactor": ("Adafactor",),
})  # fmt: skip
