# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""Checkpoints: written, published, chosen from and resumed."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config.enums import HubStrategy, SaveStrategy
from windlass.config.sections.setting import STRIDE, setting

_MAIN_PROCESS = "only the main process uploads"
HUB = "needs publishing to the hub, which is not built yet; save_model() writes what an upload needs"


@dataclass(repr=False, eq=False)
class SaveSection:
    save_only_model: bool = setting(False, "Save the model without what resuming needs.")
    save_strategy: SaveStrategy | str = setting("steps", "When to save a checkpoint.")
    save_steps: float = setting(
        500, "Updates between checkpoints; below 1 it is a share of all updates.", bounds=STRIDE
    )
    save_on_each_node: bool = setting(
        False,
        "Write the final model on every machine that has a disk of its own.",
        mapped="is for the final model: checkpoints are written on every disk that is found, always",
    )
    save_total_limit: int | None = setting(
        None, "Checkpoints to keep; the best and the last are always kept."
    )
    enable_jit_checkpoint: bool = setting(
        False,
        "Save at once when the scheduler asks the job to stop.",
        mapped="is always so: preemption_signals says on which signals a run saves and leaves",
    )


@dataclass(repr=False, eq=False)
class HubSection:
    push_to_hub: bool = setting(False, "Publish the model on the hub.", per_rank=_MAIN_PROCESS, refused=HUB)
    hub_token: str | None = setting(
        None,
        "Token for the hub; never written anywhere.",
        secret=True,
        per_rank="a secret, which never leaves its process; only the main process uploads",
        refused=HUB,
    )
    hub_private_repo: bool | None = setting(
        None, "Make the hub repository private.", per_rank=_MAIN_PROCESS, refused=HUB
    )
    hub_model_id: str | None = setting(None, "Repository on the hub.", per_rank=_MAIN_PROCESS, refused=HUB)
    hub_strategy: HubStrategy | str = setting(
        "every_save", "What is published, and when.", per_rank=_MAIN_PROCESS, refused=HUB
    )
    hub_always_push: bool = setting(
        False, "Publish even while the last publication is under way.", per_rank=_MAIN_PROCESS, refused=HUB
    )
    hub_revision: str | None = setting(None, "Branch on the hub.", per_rank=_MAIN_PROCESS, refused=HUB)


@dataclass(repr=False, eq=False)
class BestSection:
    load_best_model_at_end: bool = setting(False, "End with the best evaluated weights.")
    metric_for_best_model: str | None = setting(
        None, "Metric that says which is best, with or without 'eval_'."
    )
    greater_is_better: bool | None = setting(
        None, "Direction of the metric; not said: True unless its name ends in 'loss'."
    )


@dataclass(repr=False, eq=False)
class ResumeSection:
    ignore_data_skip: bool = setting(
        False,
        "Start the data afresh after a resume, not where the checkpoint was.",
        refused="is not built yet; a resumed run finds its place in the data, or says what it reads again",
    )
    restore_callback_states_from_checkpoint: bool = setting(
        False, "Restore the callbacks' own settings too on resume."
    )


@dataclass(repr=False, eq=False)
class ResumeFromSection:
    resume_from_checkpoint: str | bool | None = setting(
        None,
        "Checkpoint to resume from; True: the newest; 'auto': that, or a fresh start where there is none.",
        per_rank="compared where train() takes it, which an argument of train() may override",
    )
