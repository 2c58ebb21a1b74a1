"""Names that scripts import from here: optimizers and schedules (`windlass.optim`), loaded when they are asked for."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.compat.adafactor_schedule": ("AdafactorSchedule", "get_adafactor_schedule"),
    "windlass.compat.schedule_table": ("StreamingAverage", "TYPE_TO_SCHEDULER_FUNCTION"),
    "windlass.config.enums": ("SchedulerType",),
    "windlass.optim.optimizers.adafactor": ("Adafactor",),
    "windlass.optim.optimizers.adalomo": ("AdaLomo",),
    "windlass.optim.optimizers.galore_adafactor": ("GaLoreAdafactor",),
    "windlass.optim.optimizers.apollo_adamw": ("ApolloAdamW",),
    "windlass.optim.optimizers.galore_adamw": ("GaLoreAdamW",),
    "windlass.optim.optimizers.galore_adamw_8bit": ("GaLoreAdamW8bit",),
    "windlass.optim.optimizers.lomo": ("Lomo",),
    "windlass.optim.public": (
        "get_constant_schedule", "get_constant_schedule_with_warmup", "get_cosine_schedule_with_warmup",
        "get_cosine_with_hard_restarts_schedule_with_warmup", "get_cosine_with_min_lr_schedule_with_warmup",
        "get_cosine_with_min_lr_schedule_with_warmup_lr_rate", "get_greedy_schedule", "get_inverse_sqrt_schedule",
        "get_linear_schedule_with_warmup", "get_polynomial_decay_schedule_with_warmup",
        "get_reduce_on_plateau_schedule", "get_scheduler", "get_wsd_schedule",
    ),
    "windlass.optim.schedules.greedy": ("GreedyLR",),
})  # fmt: skip
