from windlass.compat.model_queries import (
    check_target_module_exists as check_target_module_exists, has_mixed_dtensor as has_mixed_dtensor,
    is_optimizer_factory as is_optimizer_factory,
)
from windlass.config.enums import (
    OptimizerNames as OptimizerNames, ParallelMode as ParallelMode,
)
from windlass.optim.optimizers.adafactor import Adafactor as Adafactor
