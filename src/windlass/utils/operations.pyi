from windlass.core.trees import (
    TensorInformation as TensorInformation, concatenate as concatenate, convert_to_fp32 as convert_to_fp32,
    find_batch_size as find_batch_size, find_device as find_device,
    get_data_structure as get_data_structure, get_shape as get_shape, honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size, initialize_tensors as initialize_tensors,
    is_namedtuple as is_namedtuple, is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor, listify as listify, pad_input_tensors as pad_input_tensors,
    recursively_apply as recursively_apply, send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from windlass.dist.operations import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    DistributedOperationException as DistributedOperationException, broadcast as broadcast,
    broadcast_object_list as broadcast_object_list, copy_tensor_to_devices as copy_tensor_to_devices,
    gather as gather, gather_object as gather_object, pad_across_processes as pad_across_processes,
    reduce as reduce,
)
