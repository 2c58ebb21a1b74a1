"""`KTOConfig`: the settings of Kahneman-Tversky optimisation, under the names that scripts know from TRL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from windlass.config.sections.fields import SAMPLING_STRATEGIES
from windlass.config.sections.setting import at_least, described, setting
from windlass.core.errors import Problem
from windlass.finetuning.reference_config import ReferenceConfig


@described()
@dataclass(repr=False)
class KTOConfig(ReferenceConfig):
    """The settings of a `KTOTrainer`: those of `TrainingArguments`, and those of single judged answers.

    Five defaults differ from `TrainingArguments`: `learning_rate` 1e-6, `logging_steps` 10,
    `gradient_checkpointing` True, `train_sampling_strategy` "sequential", and `bf16` True unless `fp16` or `fp8` is
    set.

    Raises:
        ConfigError: as for `TrainingArguments`.
    """

    # --- data ---
    train_sampling_strategy: str = setting("sequential", "Order of samples.", choices=SAMPLING_STRATEGIES)

    # --- loss ---
    loss_type: str = setting(
        "kto",
        "kto: arXiv:2402.01306; apo_zero_unpaired: without an estimate of the divergence (arXiv:2408.06266).",
        choices=("kto", "apo_zero_unpaired"),
    )
    desirable_weight: float = setting(1.0, "Weight of the losses of desirable answers.", bounds=at_least(0))
    undesirable_weight: float = setting(
        1.0, "Weight of the losses of undesirable answers.", bounds=at_least(0)
    )

    def _loss_problems(self) -> Iterator[Problem]:
        yield from super()._loss_problems()
        if not self.estimates_divergence:
            return
        if self.precompute_ref_log_probs:
            fix = (
                "loss_type='kto' compares each prompt with the answer of another row of its batch, which is not known "
                "before; leave it out, or use loss_type='apo_zero_unpaired'"
            )
            yield Problem("precompute_ref_log_probs", True, fix)
        if self.per_device_train_batch_size < 2:
            fix = (
                "Actual (not effective) batch size must be > 1: loss_type='kto' estimates a divergence from prompts "
                "with the answers of other rows"
            )
            yield Problem("per_device_train_batch_size", self.per_device_train_batch_size, fix)

    def stage_problems(self) -> Iterator[Problem]:
        if self.estimates_divergence:
            fix = (
                "estimates a divergence by a second forward of each training step, and a pipeline computes one: use "
                "loss_type='apo_zero_unpaired' with precompute_ref_log_probs=True, or set pp_size=1"
            )
            yield Problem("loss_type", self.loss_type, fix)
        else:
            yield from super().stage_problems()

    @property
    def estimates_divergence(self) -> bool:
        """True if the loss is relative to an estimated divergence from the reference."""
        return self.loss_type == "kto"
