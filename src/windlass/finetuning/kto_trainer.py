"""`KTOTrainer`: Kahneman-Tversky optimisation on single answers (Ethayarajh et al., arXiv:2402.01306)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from windlass.core.errors import DataError
from windlass.core.logs import get_job_logger
from windlass.data.collate_branches import MISMATCHED, DataCollatorForUnpairedPreference
from windlass.finetuning.answer_log_probabilities import (
    AnswerLogProbabilities,
    answer_log_probabilities,
    model_inputs,
)
from windlass.finetuning.kto_config import KTOConfig
from windlass.finetuning.preference_data import PreferenceData
from windlass.finetuning.reference_trainer import ReferenceTrainer
from windlass.finetuning.sft_data import columns_of
from windlass.text.forms import LocatedRows, RowError
from windlass.text.pair_encoder import CHOSEN, COMPLETION, REJECTED, PairOptions, PairRows, split_prompt
from windlass.text.tables import is_stream
from windlass.transforms.model_limits import ModelLimits

logger = get_job_logger(__name__)
# The weights that arXiv:2402.01306 recommends: the ratio of the weighted counts, equation 8.
_LEAST, _MOST = 1.0, 1.33


def as_judged_rows(dataset: Any) -> Any:
    """Return rows with "prompt", "completion" and "label"; of pairs, the chosen answers and then the rejected ones.

    Raises:
        DataError: a pair is invalid, a stream has pairs, or the dataset has neither form.
    """
    columns = columns_of(dataset)
    if {COMPLETION, "label"} <= columns:
        return dataset
    if not {CHOSEN, REJECTED} <= columns:
        have = ", ".join(sorted(columns)) or "none"
        raise DataError(f"a row needs prompt, completion and label, or chosen and rejected; found: {have}")
    if is_stream(dataset):
        raise DataError("a stream of pairs is not made into single answers; load it, or make its rows before")
    places = dataset.places if isinstance(dataset, LocatedRows) else None
    made: dict[str, list[dict[str, Any]]] = {CHOSEN: [], REJECTED: []}
    try:
        for number, row in enumerate(dataset):
            for name, answer in _answers(row, number, "prompt" in columns).items():
                made[name].append({**answer, "label": name == CHOSEN})
    except RowError as error:
        raise error.located(dataset) from None
    origins = places or [f"row {at}" for at in range(len(made[CHOSEN]))]
    return LocatedRows([*made[CHOSEN], *made[REJECTED]], [*origins, *origins])


def _answers(row: Any, number: int, has_prompts: bool) -> dict[str, dict[str, Any]]:
    if not isinstance(row, Mapping):
        raise RowError(number, f"must be a mapping of columns, not {type(row).__name__}")
    for name in (CHOSEN, REJECTED):
        if row.get(name) is None:
            raise RowError(number, f"column {name!r} is missing or null")
    prompt, answers = split_prompt(row, [row[CHOSEN], row[REJECTED]], number, has_prompts)
    extras = {name: row[name] for name in ("tools", "chat_template_kwargs") if row.get(name)}
    return {
        name: {"prompt": prompt, COMPLETION: answer, **extras}
        for name, answer in zip((CHOSEN, REJECTED), answers, strict=True)
    }


def warn_of_balance(rows: Any, args: KTOConfig) -> None:
    """Warn if neither weight is within what the paper recommends for the counts of the two kinds of answers."""
    if not isinstance(rows, PairRows):
        return
    labels = rows.numbers["label"][rows.kept].astype(bool)
    # At least 1, as in TRL: rows of one kind alone have no ratio.
    desirable, undesirable = max(int(np.sum(labels)), 1), max(int(np.sum(~labels)), 1)
    ratio = desirable * args.desirable_weight / max(undesirable * args.undesirable_weight, 1e-30)
    if desirable != undesirable and not (_LEAST <= round(ratio, 2) <= _MOST):
        low = undesirable * args.undesirable_weight / desirable
        logger.warning(
            "%d answers are desirable and %d are not, and their weights do not make up for it: set desirable_weight "
            "between %.2f and %.2f (arXiv:2402.01306, equation 8)",
            desirable,
            undesirable,
            low * _LEAST,
            low * _MOST,
        )


_MEANS = (
    "kl", "entropy", "logits/chosen", "logits/rejected", "logps/chosen", "logps/rejected", "rewards/chosen",
    "rewards/rejected",
)  # fmt: skip


class KTOTrainer(ReferenceTrainer[KTOConfig]):
    """Tunes a causal language model on answers that are judged one by one.

    Args:
        model: as for `DPOTrainer`.
        ref_model: as for `DPOTrainer`.
        args: the configuration; a `TrainingArguments` is converted. Defaults to `KTOConfig("<model name>-KTO")`.
        data_collator: list of samples -> batch; by default `DataCollatorForUnpairedPreference`.
        train_dataset: a dataset with the columns "prompt", "completion" and "label" (True: desirable); or pairs, as for
            `DPOTrainer`, of which each becomes two rows.
        eval_dataset: the same, or a dict of them.
        processing_class: as for `DPOTrainer`.
        compute_metrics: as for `DPOTrainer`.
        quantization_config: as for `DPOTrainer`.
        peft_config: as for `DPOTrainer`.

    The other arguments are those of `Trainer`.

    Raises:
        ConfigError, DataError, ModelError: whatever can be known to be wrong before training.
    """

    CONFIG = KTOConfig
    TAGS = ("windlass", "kto")
    REFERENCE_COLUMNS = ("ref_logps",)
    COLUMNS = ("prompt_ids", "completion_ids", "label", *REFERENCE_COLUMNS)

    def _collator(self, args: KTOConfig, pad_token_id: int) -> DataCollatorForUnpairedPreference:
        options = args.max_length, args.padding_step, args.estimates_divergence
        return DataCollatorForUnpairedPreference(pad_token_id, *options)

    def _begin_loss(self) -> None:
        warn_of_balance(self.train_dataset, self.args)
        self.loss_is_scaled_for_ga = False  # a mean over the answers of a batch
        self._begin_reports(_MEANS)

    @classmethod
    def preparation(cls, args: KTOConfig, tokenizer: Any, limits: ModelLimits) -> PreferenceData:
        """Return what prepares datasets by `args`, with `tokenizer`, for a model with `limits`."""
        options = PairOptions(
            answers=(COMPLETION,), max_length=args.max_length, num_proc=args.dataset_num_proc
        )
        numbers = ("label", *cls.REFERENCE_COLUMNS)
        return PreferenceData(tokenizer, options, limits, numbers, as_judged_rows)

    def count_targets(self, batch: Any) -> float:
        """The answers of `batch`, which its loss is a mean over."""
        return len(batch["input_ids"])

    # --- loss -------------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean over the answers of a batch, and its figures for the log. The load-balancing loss of experts is
        added.
        """
        answers = {name: value for name, value in inputs.items() if not name.startswith(MISMATCHED)}
        # First, because its forward has no graph: the activations of the one below would be in memory meanwhile.
        divergence = self._divergence(model, inputs)
        reference = answers.get("ref_logps")
        if reference is None:
            reference = self._reference.log_probabilities(model, answers)
        found = answer_log_probabilities(model, answers)
        ratios, desirable = found.sums - reference.to(found.sums), answers["label"].bool()
        losses = self._losses(ratios, desirable, divergence.to(ratios))
        loss = losses.mean()
        if found.auxiliary is not None and self._router_weight:
            loss = loss + self._router_weight * found.auxiliary
        with torch.no_grad():
            sums = _figures_of(found, self.args.beta * ratios, desirable, divergence)
            self._count(sums, inputs, found.auxiliary, len(losses))
        if not return_outputs:
            return loss
        return loss, model(**model_inputs(answers))  # as in `SFTTrainer.compute_loss`

    def _losses(self, ratios: Tensor, desirable: Tensor, divergence: Tensor) -> Tensor:
        """Equation 7 of arXiv:2402.01306, or of arXiv:2408.06266, for each answer."""
        sign = torch.where(desirable, 1.0, -1.0).to(ratios)
        weights = torch.where(desirable, self.args.desirable_weight, self.args.undesirable_weight).to(ratios)
        return weights * (1 - torch.sigmoid(self.args.beta * sign * (ratios - divergence)))

    def _divergence(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The divergence from the reference, estimated from prompts with the answers of other rows: a mean over the
        batches that all ranks compute at this time, in evaluations over the batch of this rank. At least 0.
        """
        if not self.args.estimates_divergence:
            return torch.zeros((), device=inputs["input_ids"].device)
        others = {n.removeprefix(MISMATCHED): v for n, v in inputs.items() if n.startswith(MISMATCHED)}
        with torch.no_grad():
            own = answer_log_probabilities(model, others).sums
            reference = self._reference.log_probabilities(model, others)
            sums = torch.stack([(own - reference).sum(), own.new_tensor(len(own))])
            if len(own) < 2:  # it has the answer of no other row, but its own
                sums = torch.zeros_like(sums)
            if self.model.training:
                # Rows that are repeated because other ranks have more would count twice.
                own_weight = 0.0 if self._services.loss.normaliser.filler else 1.0
                sums = self.accelerator.reduce(sums * own_weight, "sum")
            # The estimate of few samples may be negative, which a divergence never is.
            return (sums[0] / sums[1].clamp(min=1)).clamp(min=0)

    def _derived(self, figures: dict[str, float]) -> dict[str, float]:
        """The figures, with the margin between the mean rewards of both kinds of answers."""
        both = ("rewards/chosen", "rewards/rejected")
        if not all(name in figures for name in both):
            return figures
        return {**figures, "rewards/margins": figures[both[0]] - figures[both[1]]}


def _figures_of(
    found: AnswerLogProbabilities, rewards: Tensor, desirable: Tensor, divergence: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    tokens = found.mask.sum(dim=1)
    rows = rewards.new_tensor(len(rewards))
    sums = {"kl": (divergence * rows, rows), "entropy": (found.tokens.entropies.sum(), tokens.sum())}
    for name, chosen in (("chosen", desirable), ("rejected", ~desirable)):
        kept = chosen.to(rewards)
        sums[f"logits/{name}"] = (found.tokens.mean_logits.sum(dim=1) * kept).sum(), (tokens * chosen).sum()
        sums[f"logps/{name}"] = (found.sums * kept).sum(), kept.sum()
        sums[f"rewards/{name}"] = (rewards * kept).sum(), kept.sum()
    return sums
