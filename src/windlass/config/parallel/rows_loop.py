"""The settings of a user-owned loop: how its batches are distributed, and what completes an update.

Only objects of a script set them: no flag, variable or file has them, so they are not in the index of all settings.
"""

from __future__ import annotations

from windlass.config import kinds
from windlass.config.parallel.keys import Rows

_loop = Rows("loop")
SPLIT_BATCHES = _loop.switch(
    "split_batches", "Batch sizes of loaders are those of all processes together, not of each one."
)
DISPATCH_BATCHES = _loop(
    "dispatch_batches",
    kinds.flag,
    None,
    "The main process reads all batches and sends the others their share.",
)
EVEN_BATCHES = _loop(
    "even_batches",
    kinds.flag,
    True,
    "Pad the last batch by repeating samples. Both values distribute it as it is, so no sample counts twice.",
)
SEEDABLE_SAMPLER = _loop.switch(
    "use_seedable_sampler",
    "Shuffle in the order of accelerate's SeedableRandomSampler. The order follows from a seed in any case.",
)
DATA_SEED = _loop(
    "data_seed",
    kinds.natural,
    None,
    "Seed of that order; by default drawn from torch's generator at prepare().",
)
NON_BLOCKING = _loop.switch(
    "non_blocking", "Copy batches to the device without waiting; always done from pinned memory."
)
STATEFUL = _loop.switch("use_stateful_dataloader", "Save the position of a loader in its `state_dict`.")
ADJUST_SCHEDULER = _loop(
    "adjust_scheduler",
    kinds.flag,
    True,
    "Prepared schedules count micro-batches, as those of a plain loop do.",
)
SYNC_AT_END = _loop("sync_with_dataloader", kinds.flag, True, "The end of a loader completes an update.")
SYNC_EACH_BATCH = _loop.switch(
    "sync_each_batch",
    "Reduce gradients after each micro-batch: less memory under FSDP, more time. Under DeepSpeed its stage decides it.",
)
LOOP = tuple(_loop)
