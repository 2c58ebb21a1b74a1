# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""When checkpoints are written, which are kept and published, and how a run resumes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from windlass.config.enums import HubStrategy, SaveStrategy
from windlass.config.sections.setting import STRIDE, setting

HUB = "needs publishing to the hub, which is not built yet; save_model() writes the files for an upload"
_hub = partial(
    setting,
    per_rank="only the main process uploads",
    mapped="has no effect: it belongs to push_to_hub, which is not built yet",
)


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
    push_to_hub: bool = setting(
        False, "Publish the model on the hub.", per_rank="only the main process uploads", refused=HUB
    )
    hub_token: str | None = _hub(
        None,
        "Token for the hub; never written to a file or log.",
        secret=True,
        per_rank="a secret, which never leaves its process; only the main process uploads",
    )
    hub_private_repo: bool | None = _hub(None, "Make the hub repository private.")
    hub_model_id: str | None = _hub(None, "Repository on the hub.")
    hub_strategy: HubStrategy | str = _hub("every_save", "What is published, and when.")
    hub_always_push: bool = _hub(False, "Publish even if the previous upload has not finished.")
    hub_revision: str | None = _hub(None, "Branch on the hub.")

    # --- best checkpoint ---
    load_best_model_at_end: bool = setting(False, "Load the weights of the best evaluation after training.")
    metric_for_best_model: str | None = setting(None, "Metric of the best, with or without 'eval_'.")
    greater_is_better: bool | None = setting(None, "By default True unless the metric's name ends in 'loss'.")

    # --- resuming ---
    ignore_data_skip: bool = setting(
        False,
        "Restart the data after a resume, instead of continuing where the checkpoint was.",
        refused="is not built yet; a resumed run continues at its position in the data, or logs what it reads again",
    )
    restore_callback_states_from_checkpoint: bool = setting(False, "Also restore the settings of callbacks.")
