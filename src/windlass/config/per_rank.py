"""Which arguments may differ between the ranks of a job, and why. All others must be the same on every rank."""

from __future__ import annotations

import dataclasses
from typing import Any

from windlass.config.arguments import TrainingArguments

_OWN_DISK = "a path on a disk that may be this machine's own; the stores check what they need"
_OWN_OUTPUT = "what this process prints or reports; no other process reads it"
_READING = "how fast this machine reads; samples and their order do not depend on it"
_MAIN_PROCESS = "only the main process uploads"

MAY_DIFFER: dict[str, str] = {
    "output_dir": _OWN_DISK,
    "resume_from_checkpoint": "compared where train() takes it, which an argument of train() may override",
    "local_rank": "the place of this process on its machine",
    "disable_tqdm": _OWN_OUTPUT,
    "log_level": _OWN_OUTPUT,
    "log_level_replica": _OWN_OUTPUT,
    "log_on_each_node": _OWN_OUTPUT,
    "report_to": _OWN_OUTPUT,
    "run_name": _OWN_OUTPUT,
    "project": _OWN_OUTPUT,
    "trackio_space_id": _OWN_OUTPUT,
    "trackio_bucket_id": _OWN_OUTPUT,
    "trackio_static_space_id": _OWN_OUTPUT,
    "debug": _OWN_OUTPUT,
    "dataloader_num_workers": _READING,
    "dataloader_pin_memory": _READING,
    "dataloader_persistent_workers": _READING,
    "dataloader_prefetch_factor": _READING,
    "dataloader_multiprocessing_context": _READING,
    "dataloader_in_order": _READING,
    "torch_empty_cache_steps": "memory of this process alone",
    "save_host_memory": "memory of this machine alone",
    "ddp_timeout": "how long this process waits",
    "push_to_hub": _MAIN_PROCESS,
    "hub_token": "a secret, which never leaves its process; only the main process uploads",
    "hub_private_repo": _MAIN_PROCESS,
    "hub_model_id": _MAIN_PROCESS,
    "hub_strategy": _MAIN_PROCESS,
    "hub_always_push": _MAIN_PROCESS,
    "hub_revision": _MAIN_PROCESS,
    "do_train": "read by scripts, never by the Trainer",
    "do_eval": "read by scripts, never by the Trainer",
    "do_predict": "read by scripts, never by the Trainer",
}


def shared_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that every rank must have alike. Fields that a script's subclass adds are the script's own."""
    values = args.to_dict()
    names = (field.name for field in dataclasses.fields(TrainingArguments))
    return {name: values[name] for name in names if name not in MAY_DIFFER and name in values}
