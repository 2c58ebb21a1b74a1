from windlass.search.default_spaces import (
    HPSearchBackend as HPSearchBackend, default_hp_space_optuna as default_hp_space_optuna,
    default_hp_space_ray as default_hp_space_ray, default_hp_space_wandb as default_hp_space_wandb,
)
from windlass.utils.imports import (
    is_optuna_available as is_optuna_available, is_ray_tune_available as is_ray_tune_available,
    is_wandb_available as is_wandb_available,
)
