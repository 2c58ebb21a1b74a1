from windlass.compat.schedule_table import (
    AdafactorSchedule as AdafactorSchedule, StreamingAverage as StreamingAverage,
    TYPE_TO_SCHEDULER_FUNCTION as TYPE_TO_SCHEDULER_FUNCTION,
    get_adafactor_schedule as get_adafactor_schedule,
)
from windlass.config.enums import SchedulerType as SchedulerType
from windlass.optim.optimizers.adafactor import Adafactor as Adafactor
from windlass.optim.optimizers.adalomo import AdaLomo as AdaLomo
from windlass.optim.optimizers.apollo_adamw import ApolloAdamW as ApolloAdamW
from windlass.optim.optimizers.galore_adafactor import GaLoreAdafactor as GaLoreAdafactor
from windlass.optim.optimizers.galore_adamw import GaLoreAdamW as GaLoreAdamW
from windlass.optim.optimizers.galore_adamw_8bit import GaLoreAdamW8bit as GaLoreAdamW8bit
from windlass.optim.optimizers.lomo import Lomo as Lomo
from windlass.optim.public import (
    get_constant_schedule as get_constant_schedule,
    get_constant_schedule_with_warmup as get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup as get_cosine_schedule_with_warmup,
    get_cosine_with_hard_restarts_schedule_with_warmup as get_cosine_with_hard_restarts_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup as get_cosine_with_min_lr_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup_lr_rate as get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
    get_greedy_schedule as get_greedy_schedule, get_inverse_sqrt_schedule as get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup as get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup as get_polynomial_decay_schedule_with_warmup,
    get_reduce_on_plateau_schedule as get_reduce_on_plateau_schedule, get_scheduler as get_scheduler,
    get_wsd_schedule as get_wsd_schedule,
)
from windlass.optim.schedules.greedy import GreedyLR as GreedyLR
