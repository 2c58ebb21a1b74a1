"""Names that scripts import from here: searches over hyperparameters, loaded when they are first asked for."""

from windlass.config.support_names import WHY
from windlass.core.lazy import loader_of, reverse

_HOMES = {
    "windlass.compat.search_space": (
        "HPSearchBackend", "default_hp_space_optuna", "default_hp_space_ray", "default_hp_space_wandb",
    ),
    "windlass.utils.imports": ("is_optuna_available", "is_ray_tune_available", "is_wandb_available"),
}  # fmt: skip
_NAMES = reverse(_HOMES)
__getattr__ = loader_of(__name__, _NAMES, WHY)
__all__ = sorted(_NAMES)
