from windlass.accelerator.accelerator import Accelerator as Accelerator
from windlass.compat.checkpoint_folders import TRAINER_STATE_NAME as TRAINER_STATE_NAME
from windlass.compat.state import AcceleratorState as AcceleratorState
from windlass.compat.tracker_callbacks import (
    get_reporting_integration_callbacks as get_reporting_integration_callbacks,
)
from windlass.data import (
    DataCollatorWithPadding as DataCollatorWithPadding, default_data_collator as default_data_collator,
)
from windlass.data.skip import skip_first_batches as skip_first_batches
from windlass.optim.public import get_scheduler as get_scheduler
from windlass.optim.schedules.greedy import GreedyLR as GreedyLR
from windlass.trainer.defaults import (
    DEFAULT_CALLBACKS as DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK as DEFAULT_PROGRESS_CALLBACK,
)
from windlass.trainer.trainer import Trainer as Trainer
from windlass.trainer_callback import *
from windlass.trainer_optimizer import *
from windlass.trainer_pt_utils import *
from windlass.trainer_utils import *
