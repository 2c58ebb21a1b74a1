"""Names that scripts import from here (big models, `windlass.transforms`)."""

from windlass.accelerator.checkpoint_loading import (
    load_checkpoint_in_model,
)
from windlass.transforms.auto_device_map import (
    infer_auto_device_map,
)
from windlass.transforms.device_map import (
    check_device_map,
    check_tied_parameters_on_same_device,
)
from windlass.transforms.device_memory import (
    get_balanced_memory,
    get_max_memory,
)
from windlass.transforms.module_sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    get_max_layer_size,
)
from windlass.transforms.module_tensors import (
    find_tied_parameters,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from windlass.transforms.offload import (
    align_module_device,
    has_offloaded_params,
)

__all__ = [
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_on_same_device",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "has_offloaded_params",
    "infer_auto_device_map",
    "load_checkpoint_in_model",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]
