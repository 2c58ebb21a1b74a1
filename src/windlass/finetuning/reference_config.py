"""`ReferenceConfig`: the settings of trainers that compare a model with a reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from windlass.config.sections.setting import Range, above, at_least, described, setting
from windlass.core.errors import Problem, refuse
from windlass.finetuning.tuning_config import TuningConfig

SHARE = Range(lambda v: 0 <= v <= 1, "must be between 0 and 1")


@described()
@dataclass(repr=False)
class ReferenceConfig(TuningConfig):
    """What `DPOConfig` and `KTOConfig` share: those of `TuningConfig`, and those of the reference.

    Raises:
        ConfigError: as for `TrainingArguments`.
    """

    learning_rate: float = setting(1e-6, "Learning rate at the end of warm-up.", bounds=at_least(0))

    # --- model ---
    router_aux_loss_coef: float | None = setting(
        None,
        "Weight of the load-balancing loss of experts; by default the model's; 0 turns it off.",
        bounds=at_least(0),
    )
    disable_dropout: bool = setting(True, "Set all dropout of the model and of the reference to 0.")

    # --- data ---
    max_length: int | None = setting(
        1024, "Tokens of a prompt with its answer; None does not truncate.", bounds=at_least(1)
    )
    precompute_ref_log_probs: bool = setting(
        False, "Compute the reference's log-probabilities once, before training, and keep them on the disk."
    )
    precompute_ref_batch_size: int | None = setting(
        None,
        "Rows of a batch of that computation; by default those of a training or evaluation batch.",
        bounds=at_least(1),
    )

    # --- loss ---
    beta: float = setting(
        0.1, "How strongly the model is held to the reference; higher is closer.", bounds=above(0)
    )

    # --- reference ---
    sync_ref_model: bool = setting(
        False, "Move the reference towards the model at intervals (TR-DPO, arXiv:2404.09656)."
    )
    ref_model_mixup_alpha: float = setting(
        0.6, "The share of the model in the reference after such a move.", bounds=SHARE
    )
    ref_model_sync_steps: int = setting(512, "Updates between two of them.", bounds=at_least(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self._loss_problems())

    def stage_problems(self) -> Iterator[Problem]:
        """What a pipeline cannot compute: it has one forward in a training step."""
        if not self.precompute_ref_log_probs:
            fix = "a pipeline computes one forward in a training step: set it to True, or pp_size=1"
            yield Problem("precompute_ref_log_probs", False, fix)

    def _loss_problems(self) -> Iterator[Problem]:
        if self.sync_ref_model and self.precompute_ref_log_probs:
            fix = "moves the reference, whose log-probabilities precompute_ref_log_probs computes once; leave one out"
            yield Problem("sync_ref_model", True, fix)
        unread = self._idle_settings()
        for item in fields(self):
            if item.name in unread and getattr(self, item.name) != item.default:
                fix = f"has no effect {unread[item.name]}; leave it out"
                yield Problem(item.name, getattr(self, item.name), fix)

    def _idle_settings(self) -> dict[str, str]:
        """The settings that nothing reads -> with what they have no effect."""
        unread = {}
        if not self.sync_ref_model:
            for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
                unread[name] = "without sync_ref_model=True"
        if not self.precompute_ref_log_probs:
            unread["precompute_ref_batch_size"] = "without precompute_ref_log_probs=True"
        return unread
