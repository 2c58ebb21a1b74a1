# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""`DPOConfig`: the settings of direct preference optimisation, under the names that scripts know from TRL."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from windlass.config.sections.setting import Range, above, described, setting
from windlass.core.errors import Problem
from windlass.finetuning.reference_config import SHARE, ReferenceConfig
from windlass.text.text_options import TRUNCATION_MODES

LOSS_TYPES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
# Losses in which only the difference of the two rewards counts: a term of the prompt alone cancels (arXiv:2309.16240).
_OF_DIFFERENCE = frozenset(
    {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
)
_SMOOTHED = frozenset({"robust", "exo_pair", "aot", "aot_unpaired"})
_WITHOUT_PAIRS = frozenset({"aot", "aot_unpaired", "sft"})


@described()
@dataclass(repr=False)
class DPOConfig(ReferenceConfig):
    """The settings of a `DPOTrainer`: those of `TrainingArguments`, and those of preferences.

    Four defaults differ from `TrainingArguments`: `learning_rate` 1e-6, `logging_steps` 10,
    `gradient_checkpointing` True, and `bf16` True unless `fp16` or `fp8` is set.

    Raises:
        ConfigError: as for `TrainingArguments`.
    """

    # --- data ---
    truncation_mode: str = setting(
        "keep_start",
        "Which end of a long sequence is kept; error: such a row is refused.",
        choices=TRUNCATION_MODES,
    )
    padding_free: bool = setting(
        False, "Join the pairs of a batch into one row without padding, and compute each prompt once."
    )

    # --- loss ---
    loss_type: list[str] = setting(
        ["sigmoid"], "The losses; several are added up with `loss_weights`.", words=LOSS_TYPES
    )
    loss_weights: list[float] | None = setting(None, "A weight for each loss; by default 1.")
    ld_alpha: float | None = setting(
        None, "Weight of the tokens beyond the shorter answer (LD-DPO, arXiv:2409.06411).", bounds=SHARE
    )
    f_divergence_type: str = setting(
        "reverse_kl",
        "How the distance to the reference is measured (f-DPO, arXiv:2309.16240).",
        choices=DIVERGENCES,
    )
    f_alpha_divergence_coef: float = setting(
        0.5, "The alpha of alpha_divergence.", bounds=Range(math.isfinite, "must be a finite number")
    )
    label_smoothing: float = setting(
        0.0,
        "Share of wrong preferences that robust, exo_pair, aot and aot_unpaired assume.",
        bounds=Range(lambda v: 0 <= v < 0.5, "must be at least 0 and below 0.5"),
    )
    use_weighting: bool = setting(
        False, "Weigh each pair by the model's own probability of its answers (WPO, arXiv:2406.11827)."
    )
    discopop_tau: float = setting(0.05, "Temperature of discopop (arXiv:2406.08414).", bounds=above(0))

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        if self.truncation_mode == "keep_end":
            self._warn_old(
                "truncation_mode='keep_end' is deprecated: the end of an answer may lack its prompt"
            )
        super().__post_init__()

    def _loss_problems(self) -> Iterator[Problem]:
        kinds, weights = self.loss_type, self.loss_weights
        if not kinds:
            yield Problem("loss_type", kinds, f"name at least one of {', '.join(LOSS_TYPES)}")
        if weights is not None and len(weights) != len(kinds):
            fix = (
                "`loss_weights` must have the same length as `loss_type`; give one weight for each of "
                f"{', '.join(kinds)}"
            )
            yield Problem("loss_weights", weights, fix)
        if not all(map(math.isfinite, weights or ())):
            yield Problem("loss_weights", weights, "must be finite numbers")
        if self.f_divergence_type != "reverse_kl" and not _OF_DIFFERENCE.issuperset(kinds):
            others = ", ".join(sorted(set(kinds) - _OF_DIFFERENCE))
            fix = f"has no meaning for {others}, which are not losses of a difference; use 'reverse_kl'"
            yield Problem("f_divergence_type", self.f_divergence_type, fix)
        if self.use_weighting and _WITHOUT_PAIRS.intersection(kinds):
            others = ", ".join(sorted(_WITHOUT_PAIRS.intersection(kinds)))
            fix = f"weighs pairs, which {others} does not compare; leave one of the two out"
            yield Problem("use_weighting", True, fix)
        if "exo_pair" in kinds and not self.label_smoothing:
            fix = "Label smoothing must be greater than 0.0 when using 'exo_pair'; its paper recommends 1e-3"
            yield Problem("label_smoothing", self.label_smoothing, fix)
        if self.label_smoothing and not _SMOOTHED.intersection(kinds):
            fix = f"has no effect on {', '.join(kinds)}; it is for {', '.join(sorted(_SMOOTHED))}"
            yield Problem("label_smoothing", self.label_smoothing, fix)
        yield from super()._loss_problems()

    def _idle_settings(self) -> dict[str, str]:
        chosen = f"on loss_type={self.loss_type} with f_divergence_type={self.f_divergence_type!r}"
        tokens_alone = set(self.loss_type) == {"sft"}
        unread = {
            "discopop_tau": "discopop" not in self.loss_type,
            "f_alpha_divergence_coef": self.f_divergence_type != "alpha_divergence",
            "f_divergence_type": tokens_alone,
            "ld_alpha": tokens_alone,
        }
        return super()._idle_settings() | {name: chosen for name, idle in unread.items() if idle}

    @property
    def weighted_losses(self) -> list[tuple[str, float]]:
        """Each loss with its weight."""
        weights = self.loss_weights or [1.0] * len(self.loss_type)
        return list(zip(self.loss_type, weights, strict=True))
