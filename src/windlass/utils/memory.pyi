from windlass.accelerator.device_cache import (
    clear_device_cache as clear_device_cache, should_reduce_batch_size as should_reduce_batch_size,
)
from windlass.compat.batch_size import (
    find_executable_batch_size as find_executable_batch_size, release_memory as release_memory,
)
