"""`DPOTrainer`: direct preference optimisation of a causal language model (Rafailov et al., arXiv:2305.18290)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.data.collate_branches import DataCollatorForSharedPrompts
from windlass.data.collate_preference import DataCollatorForPreference
from windlass.finetuning.answer_log_probabilities import (
    AnswerLogProbabilities,
    answer_log_probabilities,
    model_inputs,
)
from windlass.finetuning.dpo_config import DPOConfig
from windlass.finetuning.dpo_objective import PairTerms, UpdateLoss, figures_of, loss_sums
from windlass.finetuning.preference_data import PreferenceData
from windlass.finetuning.reference_trainer import ReferenceTrainer
from windlass.finetuning.sft_data import columns_of
from windlass.text.pair_encoder import PairOptions
from windlass.transforms.branches import refuse_unbranched
from windlass.transforms.document_attention import documents_apart
from windlass.transforms.model_limits import ModelLimits

_MEANS = (
    "entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected", "logps/chosen", "logps/rejected",
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
)  # fmt: skip
# Of a loss that is a mean over pairs and one over tokens; not logged.
_PARTS = ("_loss_of_pairs", "_loss_of_tokens")


class DPOTrainer(ReferenceTrainer[DPOConfig]):
    """Tunes a causal language model on preferences: rows with a chosen and a rejected answer.

    Args:
        model: a model; its name or folder; a config of transformers, for new weights; or a `PeftModel`.
        ref_model: the reference. By default the model as it is before training: with an adapter, the model without it,
            or with a frozen copy of the adapter that a `PeftModel` came with; else a copy.
        args: the configuration; a `TrainingArguments` is converted. Defaults to `DPOConfig("<model name>-DPO")`.
        data_collator: list of samples -> batch; by default `DataCollatorForPreference`.
        train_dataset: a `Dataset` or `IterableDataset` of the package datasets, or a sequence of mappings, with the
            columns "chosen" and "rejected", and "prompt" unless both begin with it; each text, or a list of messages.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; by default that of the model's name or folder.
        compute_metrics: gets the logits of whole batches, which an extra forward makes.
        quantization_config: how a model given by name is quantized.
        peft_config: the adapter to train, such as `peft.LoraConfig`; the model's own weights are frozen.

    The other arguments are those of `Trainer`.

    Raises:
        ConfigError, DataError, ModelError: whatever can be known to be wrong before training.
    """

    CONFIG = DPOConfig
    TAGS = ("windlass", "dpo")
    REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
    COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids", *REFERENCE_COLUMNS)
    CALLED = ("compute_ref_log_probs",)
    PAIRS = True

    def _begin_loss(self) -> None:
        self._objective = UpdateLoss(self.args)
        self._begin_reports((*_MEANS, *(_PARTS if self._objective.counts_tokens else ())))
        self.loss_is_scaled_for_ga = self._services.loss.asks_for_factor = self._objective.is_scaled
        if self.args.padding_free:
            self._check_branches()

    @classmethod
    def preparation(cls, args: DPOConfig, tokenizer: Any, limits: ModelLimits) -> PreferenceData:
        """Return what prepares datasets by `args`, with `tokenizer`, for a model with `limits`."""
        options = PairOptions(
            max_length=args.max_length, truncation_mode=args.truncation_mode, num_proc=args.dataset_num_proc
        )
        return PreferenceData(tokenizer, options, limits, cls.REFERENCE_COLUMNS, _with_whole_reference)

    # --- rows with shared prompts -----------------------------------------------------------------------------------

    def _check_passed(self, args: DPOConfig, *, own_collator: bool, has_metrics: bool) -> None:
        if args.padding_free and own_collator:
            fix = "batches are one row without padding, which only the built-in collator makes; leave data_collator out"
            raise ConfigError(Problem("padding_free", True, fix))
        if args.padding_free and has_metrics:
            fix = "`compute_metrics` gets the logits of padded batches; leave one of the two out"
            raise ConfigError(Problem("padding_free", True, fix))

    def _collator(self, args: DPOConfig, pad_token_id: int) -> DataCollatorForPreference:
        options = (pad_token_id, args.max_length, args.truncation_mode, args.padding_step)
        if not args.padding_free:
            return DataCollatorForPreference(*options)
        # The balancing loss of experts is a mean over all tokens that are computed.
        return DataCollatorForSharedPrompts(*options, shares_prompts=not self._router_weight)

    def _check_branches(self) -> None:
        """Refuse a model that cannot compute a prompt once for both of its answers."""
        if self._session.data_ranks.size != self._session.all_ranks.size:
            fix = "ranks that share the samples of a batch divide its rows; train with data parallelism alone"
            raise ConfigError(Problem("padding_free", True, fix))
        with documents_apart(self.model, branched=True):
            refuse_unbranched(self.model)

    @contextlib.contextmanager
    def _documents_apart(self) -> Iterator[None]:
        """Context in which the model and its reference see the groups of a row, whose answers do not see each other."""
        with contextlib.ExitStack() as stack:
            if self.args.padding_free:
                for model in filter(None, (self.model, self.ref_model)):
                    stack.enter_context(documents_apart(model, branched=True))
            yield

    # --- loss -------------------------------------------------------------------------------------------------------

    def count_targets(self, batch: Any) -> float:
        """The pairs of `batch`, which its loss is a mean over."""
        return self._objective.count(batch)

    def _reference_sums(self, batch: Any) -> Tensor:
        with self._documents_apart(), self.compute_loss_context_manager():
            return torch.cat(self.compute_ref_log_probs(self.model, self._prepare_inputs(batch)))

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
        """The log-probabilities of the chosen and of the rejected answers of a batch under the reference, of shape
        (pairs,). `model` is the trained model, which is also the reference if an adapter is switched off; `inputs` is a
        collated batch on this process's device.
        """
        sums = self._reference.log_probabilities(model, inputs, self.args.ld_alpha)
        chosen, rejected = sums.chunk(2)
        return chosen, rejected

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of one batch, a mean over its pairs, and its figures for the log. The load-balancing loss of experts
        is added.
        """
        if "ref_chosen_logps" in inputs:
            reference = inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
        else:  # before the model's own forward, whose activations would be in memory meanwhile
            reference = self.compute_ref_log_probs(model, inputs)
        found = answer_log_probabilities(model, inputs, self.args.ld_alpha)
        terms = _terms(found, reference)
        of_pairs, of_tokens = loss_sums(found, terms, self.args)
        auxiliary = found.auxiliary if self._router_weight else None
        if auxiliary is not None:
            of_pairs = of_pairs + self._router_weight * auxiliary * len(terms.chosen)
        loss = self._objective.loss((of_pairs, of_tokens), terms, num_items_in_batch)
        with torch.no_grad():
            sums = figures_of(found, terms, self.args.beta)
            if self._objective.counts_tokens:
                sums["_loss_of_pairs"] = of_pairs, terms.chosen.new_tensor(len(terms.chosen))
                sums["_loss_of_tokens"] = of_tokens, terms.chosen_tokens.sum()
            self._count(sums, inputs, auxiliary, len(terms.chosen))
        loss = self._services.loss.multiplied(loss, num_items_in_batch) if self._objective.is_scaled else loss
        if not return_outputs:
            return loss
        return loss, model(**model_inputs(inputs))  # as in `SFTTrainer.compute_loss`


def _terms(found: AnswerLogProbabilities, reference: tuple[Tensor, Tensor]) -> PairTerms:
    chosen, rejected = found.split(found.sums)
    tokens = found.split(found.mask.sum(dim=1))
    return PairTerms(chosen, rejected, reference[0].to(chosen), reference[1].to(chosen), *tokens)


def _with_whole_reference(dataset: Any) -> Any:
    """The same dataset; raises DataError if it has the log-probabilities of one answer alone."""
    given = columns_of(dataset).intersection(DPOTrainer.REFERENCE_COLUMNS)
    if len(given) == 1:
        (other,) = set(DPOTrainer.REFERENCE_COLUMNS) - given
        raise DataError(
            f"has the column {given.pop()!r} without {other!r}: a reference needs both, or neither"
        )
    return dataset
