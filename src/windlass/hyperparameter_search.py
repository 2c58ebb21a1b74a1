"""Names that scripts import from here: searches over hyperparameters, loaded when they are first asked for."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.compat.search_space": (
        "HPSearchBackend", "default_hp_space_optuna", "default_hp_space_ray", "default_hp_space_wandb",
    ),
    "windlass.utils.imports": ("is_optuna_available", "is_ray_tune_available", "is_wandb_available"),
})  # fmt: skip
