from windlass.accelerator.offloaded_weights import has_offloaded_params as has_offloaded_params
from windlass.compat.big_models.auto_device_map import (
    check_device_map as check_device_map,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    infer_auto_device_map as infer_auto_device_map,
)
from windlass.compat.big_models.checkpoint_loading import (
    load_checkpoint_in_model as load_checkpoint_in_model, load_state_dict as load_state_dict,
)
from windlass.compat.big_models.device_memory import (
    calculate_maximum_sizes as calculate_maximum_sizes, compute_module_sizes as compute_module_sizes,
    dtype_byte_size as dtype_byte_size, get_balanced_memory as get_balanced_memory,
    get_max_layer_size as get_max_layer_size, get_max_memory as get_max_memory,
)
from windlass.compat.big_models.module_tensors import (
    align_module_device as align_module_device, find_tied_parameters as find_tied_parameters,
    get_non_persistent_buffers as get_non_persistent_buffers, named_module_tensors as named_module_tensors,
    retie_parameters as retie_parameters, set_module_tensor_to_device as set_module_tensor_to_device,
)
from windlass.compat.model_queries import is_peft_model as is_peft_model
from windlass.config.kinds import convert_file_size_to_int as convert_file_size_to_int
