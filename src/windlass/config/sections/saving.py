# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""When checkpoints are written, which are kept and published, and how a run resumes."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config.enums import HubStrategy, SaveStrategy
from windlass.config.sections.setting import STRIDE, setting

_MAIN_UPLOADS = "only the main process uploads"


@dataclass(repr=False, eq=False)
class SavingSection:
    # --- checkpoints ---
    save_only_model: bool = setting(False, "Save the model without what resuming needs.")
    save_strategy: SaveStrategy | str = setting("steps", "When to save a checkpoint.")
    save_steps: float = setting(500, "Updates between checkpoints; below 1 a share of all.", bounds=STRIDE)
    save_on_each_node: bool = setting(
        False,
        "Write the final model on every machine that has its own disk.",
        mapped="applies to the final model: checkpoints are always written on every disk",
    )
    save_total_limit: int | None = setting(None, "Checkpoints to keep; always the best and the last.")
    enable_jit_checkpoint: bool = setting(
        False,
        "Save immediately when the scheduler asks the job to stop.",
        mapped="is always on: a run saves and exits on the signals in preemption_signals",
    )

    # --- hub ---
    push_to_hub: bool = setting(False, "Publish the model on the Hub.", per_rank=_MAIN_UPLOADS)
    hub_token: str | None = setting(
        None,
        "Token for the Hub; never written to a file or log.",
        secret=True,
        per_rank="a secret, which never leaves its process; only the main process uploads",
    )
    hub_private_repo: bool | None = setting(
        None, "Make a new repository private; None for the owner's default.", per_rank=_MAIN_UPLOADS
    )
    hub_model_id: str | None = setting(
        None, "Repository on the Hub; the output folder's name by default.", per_rank=_MAIN_UPLOADS
    )
    hub_strategy: HubStrategy | str = setting(
        "every_save", "What is published, and when.", per_rank=_MAIN_UPLOADS
    )
    hub_always_push: bool = setting(
        False,
        "Publish every save; otherwise one that still waits for an upload is replaced by the next.",
        per_rank=_MAIN_UPLOADS,
    )
    hub_revision: str | None = setting(
        None, "Branch on the Hub; it is created if it does not exist.", per_rank=_MAIN_UPLOADS
    )

    # --- best checkpoint ---
    load_best_model_at_end: bool = setting(False, "Load the weights of the best evaluation after training.")
    metric_for_best_model: str | None = setting(None, "Metric of the best, with or without 'eval_'.")
    greater_is_better: bool | None = setting(None, "By default True unless the metric's name ends in 'loss'.")

    # --- resuming ---
    ignore_data_skip: bool = setting(
        False,
        "A resumed run begins its epoch again, instead of continuing in it where the checkpoint was.",
    )
    restore_callback_states_from_checkpoint: bool = setting(False, "Also restore the settings of callbacks.")
