"""The tables of refused names in a page: `python -m tests.docs.refused_names docs/compatibility.md` writes them."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from windlass.compat.refused_names import (
    COMMANDS,
    DEEPSPEED,
    INSIDE,
    NEFTUNE,
    REFUSED,
    SAGEMAKER,
    SEARCH,
    TPU,
)

_DISPLAY = (
    "progress has a display of its own, and plain lines without a terminal; override on_log to write more"
)
_FORKED = "notebook_launcher starts processes that need not know of it"
_OF_ACCELERATOR = (
    "Accelerator has it, under this name or as step_scheduler_with_optimizer, state or gradient_state"
)
_LOADER_INSIDE = (
    "adjust_state_dict_for_prefetch", "base_dataloader", "begin", "dl_state_dict", "end", "reset",
    "use_stateful_dataloader",
)  # fmt: skip

# Class -> reason -> its methods, properties, fields and attributes.
MEMBERS: dict[str, dict[str, tuple[str, ...]]] = {
    "Trainer": {
        SEARCH: ("compute_objective", "hp_name", "hp_search_backend", "hp_space", "objective"),
        NEFTUNE: ("neftune_hook_handle", "neftune_noise_alpha"),
        INSIDE: ("model_preparation_time", "push_in_progress"),
    },
    "TrainingArguments": {
        INSIDE: ("default_optim", "fsdp_plugin_args", "is_torch_greater_or_equal_than_2_8"),
        TPU: ("xla_fsdp_config",),
    },
    "TrainerMemoryTracker": {
        INSIDE: (
            "cpu", "cpu_mem_used", "cpu_mem_used_at_start", "cpu_mem_used_now", "cpu_mem_used_peak",
            "derive_stage", "gpu", "gpu_mem_used_at_start", "gpu_mem_used_now", "gpu_mem_used_peak",
            "init_reported", "peak_monitor_func", "peak_monitoring", "process", "torch",
        ),
    },
    "ProgressCallback": {
        _DISPLAY: ("current_step", "prediction_bar"),
    },
    "ParallelMode": {SAGEMAKER: ("SAGEMAKER_DATA_PARALLEL", "SAGEMAKER_MODEL_PARALLEL")},
    "BatchRebalanceSampler": {INSIDE: ("QUADRATIC_COST_COEF", "has_tail", "num_full_batches", "remainder")},
    "GreedyLR": {INSIDE: ("reset_start_original",)},
    "ClearMLCallback": {INSIDE: ("log_suffix",)},
    "TensorBoardCallback": {"event files lie in the output folder": ("logging_dir",)},
    "TrackioCallback": {INSIDE: ("BADGE_MARKDOWN", "MIN_TRACKIO_VERSION_FOR_FREEZE", "SPACE_URL")},
    "PartialState": {
        "a process takes the device of its local rank as it starts": ("set_device",),
        _FORKED: ("fork_launched",),
    },
    "AcceleratorState": {
        "Accelerator.torch_device_mesh is the mesh": ("device_mesh",),
        TPU: ("downcast_bfloat",),
        _FORKED: ("fork_launched",),
    },
    "GradientState": {TPU: ("is_xla_gradients_synced",), INSIDE: ("dataloader_references",)},
    "Accelerator": {"LOMO optimizers are prepared and used as any other": ("has_lomo_optimizer",)},
    "DeepSpeedPlugin": {
        DEEPSPEED: (
            "deepspeed_config_process", "dschf", "fill_match", "select", "set_deepspeed_weakref",
            "set_moe_leaf_modules", "zero3_init_context_manager",
        ),
    },
    "DistributedDataParallelKwargs": {
        "the hook is registered as the model is prepared": ("register_comm_hook",)
    },
    "FullyShardedDataParallelPlugin": {"set cpu_offload": ("set_cpu_offload",)},
    "ProfileKwargs": {"Accelerator.profile makes the profiler": ("build",)},
    "ParallelismConfig": {
        "it returns nothing in that library; dataclasses.asdict gives the sizes": ("to_json",)
    },
    "AcceleratedScheduler": {
        _OF_ACCELERATOR: ("gradient_state", "split_batches", "step_with_optimizer"),
        "print get_last_lr()": ("print_lr",),
    },
    "AcceleratedOptimizer": {
        _OF_ACCELERATOR: ("accelerator_state", "device_placement", "gradient_state", "scaler"),
    },
    "DataLoaderDispatcher": {
        INSIDE: (
            *_LOADER_INSIDE, "get_sampler", "set_sampler", "slice_fn", "state", "submesh_dp", "submesh_fsdp",
            "submesh_tp", "torch_device_mesh",
        ),
    },
    "DataLoaderShard": {INSIDE: (*_LOADER_INSIDE, "get_sampler", "set_sampler")},
    "SkipDataLoader": {INSIDE: _LOADER_INSIDE},
    "AlignDevicesHook": {
        INSIDE: (
            "buffer_original_devices", "param_original_devices", "tied_params_names",
            "tied_pointers_to_remove",
        ),
    },
    "OffloadedWeightsLoader": {"iterate it, as any mapping": ("all_keys",)},
    "ClearMLTracker": {INSIDE: ("user_provided_run_name",)},
    "TensorBoardTracker": {INSIDE: ("logging_dir_param",)},
    "LocalSGD": {INSIDE: ("accelerator", "local_sgd_steps", "model", "model_sync_obj")},
}  # fmt: skip


def _table(head: str, rows: Mapping[str, Iterable[str]]) -> str:
    lines = [f"| {head} | why |", "|---|---|"]
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {why} |" for why, names in rows.items()]
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """The tables of the page, by the marks around them."""
    members: dict[str, list[str]] = defaultdict(list)
    for owner, table in MEMBERS.items():
        for why, names in table.items():
            members[why] += [f"{owner}.{name}" for name in names]
    return {
        "refused names": _table("names", REFUSED),
        "refused commands": _table("modules of `accelerate.commands`", COMMANDS),
        "refused members": _table("members", members),
    }


def filled_in(page: str) -> str:
    """The page with its tables as they are now."""
    for mark, table in tables().items():
        begin, end = f"<!-- begin: {mark} -->", f"<!-- end: {mark} -->"
        pattern = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
        page = pattern.sub(lambda _, table=table: f"{table}\n", page)  # type: ignore[misc]
    return page


def main(page: str) -> None:
    path = Path(page)
    path.write_text(filled_in(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
