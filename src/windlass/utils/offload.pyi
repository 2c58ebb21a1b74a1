from windlass.compat.big_models.attach_hooks import (
    PrefixedDataset as PrefixedDataset, extract_submodules_state_dict as extract_submodules_state_dict,
)
from windlass.compat.big_models.offloaded import (
    OffloadedWeightsLoader as OffloadedWeightsLoader, offload_state_dict as offload_state_dict,
    offload_weight as offload_weight, save_offload_index as save_offload_index,
)
