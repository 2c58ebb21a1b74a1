"""What FSDP2 keeps of a unit, in the releases of torch that differ in it."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule


def groups_of(unit: FSDPModule) -> list[Any]:
    """The groups of parameters of a unit, each gathered at once: before torch 2.12 it has one, or none."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reset(units: list[FSDPModule]) -> None:
    """Forget the forward or backward that an error ended: its gradients, and what of it is gathered.

    Args:
        units: of a model that ran once at least; the root is the first.
    """
    root: Any = units[0]
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    # As `reset_iter_state` does it, which torch before 2.13 lacks.
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = root._get_fsdp_state()
    shared = state._state_ctx
    state._device_handle.synchronize()
    state._comm_ctx.lazy_init(state._device)  # forgets what is on its way
    for each in shared.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
    for group in (group for unit in units for group in groups_of(unit)):
        group.finalize_backward()
        group._training_state, group._partial_reduce_output = TrainingState.IDLE, None
        group.reshard()
    shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False
