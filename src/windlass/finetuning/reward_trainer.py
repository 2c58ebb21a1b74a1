"""`RewardTrainer`: a model with one number for each text, the higher the more it is preferred (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.config.arguments import TrainingArguments
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.data.collate_preference import DataCollatorForPreference
from windlass.finetuning.answer_log_probabilities import model_inputs
from windlass.finetuning.fine_tuner import FineTuner
from windlass.finetuning.frozen_reference import without_dropout
from windlass.finetuning.peft_adapters import predicts_first_labels
from windlass.finetuning.preference_data import PreferenceData
from windlass.finetuning.reward_config import RewardConfig
from windlass.finetuning.skipped_overrides import check_overrides
from windlass.finetuning.tuned_model import begin_tuning, open_tuned_model
from windlass.text.pair_encoder import PairOptions
from windlass.transforms.model_limits import ModelLimits


class RewardTrainer(FineTuner):
    """Trains a sequence classifier with one output on preferences.

    Args:
        model: a sequence classifier with one label; a name or folder, which is loaded as one, with a new head unless it
            has one; a config of transformers, for new weights; or a `PeftModel`.
        args: the configuration; a `TrainingArguments` is converted. Defaults to `RewardConfig("<model name>-Reward")`.
        data_collator: list of samples -> batch; by default `DataCollatorForPreference`.
        train_dataset: as for `DPOTrainer`; a column "margin" has by how much the chosen answer is better.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; by default that of the model's name or folder.
        compute_metrics: gets the rewards of chosen and rejected answers, of shape (pairs, 2), and labels that
            are all 0: the chosen ones are the first.
        quantization_config: how a model given by name is quantized.
        peft_config: the adapter to train; the head is trained too.

    The other arguments are those of `Trainer`.

    Raises:
        ConfigError, DataError, ModelError: whatever can be known to be wrong before training.
    """

    args: RewardConfig
    TAGS = ("windlass", "reward-trainer")
    COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids", "margin")
    PAIRS = True

    def __init__(
        self,
        model: Any,
        args: RewardConfig | TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        check_overrides(self, self.CALLED)
        args = begin_tuning(RewardConfig, args, model, train_dataset)
        base = open_tuned_model(model, args, processing_class, quantization_config, peft_config, labels=1)
        _refuse_learnt_prompts(base.model)
        if args.disable_dropout:
            without_dropout(base.model)
        self._data = self.preparation(args, base.tokenizer, ModelLimits.of(base.model))
        super().__init__(
            base.model,
            args,
            data_collator
            or DataCollatorForPreference(base.tokenizer.pad_token_id, pad_to_multiple_of=args.padding_step),
            self._data.prepare(train_dataset, "train"),
            None if eval_dataset is None else self._data.prepare_all(eval_dataset),
            base.processing_class,
            None,
            None,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics,
        )
        self._begin_reports(("mean_reward", "accuracy", "margin"), extremes=("min_reward", "max_reward"))
        self.can_return_loss, self.label_names = True, []
        self.loss_is_scaled_for_ga = False  # a mean over the pairs of a batch

    @classmethod
    def preparation(cls, args: RewardConfig, tokenizer: Any, limits: ModelLimits) -> PreferenceData:
        """Return what prepares datasets by `args`, with `tokenizer`, for a model with `limits`."""
        options = PairOptions(
            max_length=args.max_length, whole=True, eos_token=args.eos_token, num_proc=args.dataset_num_proc
        )
        return PreferenceData(tokenizer, options, limits, ("margin",))

    def count_targets(self, batch: Any) -> float:
        """The pairs of `batch`, which its loss is a mean over."""
        return len(batch["input_ids"]) // 2

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean over pairs of `-log sigmoid(chosen - rejected - margin)`, and its figures for the log."""
        outputs = model(**model_inputs(inputs), use_cache=False)  # nothing is generated after these rows
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        if logits.shape[-1] != 1:
            raise ModelError(
                f"a reward model has one output, and this one has {logits.shape[-1]}: set num_labels=1"
            )
        # In mixed precision the head returns numbers of 8 bits, and so would each operation on them.
        rewards = logits.squeeze(-1).to(torch.promote_types(logits.dtype, torch.float32))
        chosen, rejected = rewards.chunk(2)
        margin = inputs["margin"].to(chosen) if "margin" in inputs else 0.0
        loss = -F.logsigmoid(chosen - rejected - margin).mean()
        if self.args.center_rewards_coefficient is not None:
            loss = loss + self.args.center_rewards_coefficient * ((chosen + rejected) ** 2).mean()
        with torch.no_grad():
            pairs = rewards.new_tensor(len(chosen))
            sums = {
                "mean_reward": (rewards.sum(), 2 * pairs),
                "accuracy": ((chosen > rejected).sum(), pairs),
                "margin": ((chosen - rejected).sum(), pairs),
            }
            extremes = {"min_reward": rewards.min(), "max_reward": rewards.max()}
            self._count(sums, inputs, extremes=extremes)
        return (loss, {"rewards": torch.stack([chosen, rejected], dim=1)}) if return_outputs else loss

    def _evaluated(self, inputs: Any, outputs: Any) -> tuple[Tensor, Tensor]:
        rewards: Tensor = outputs["rewards"].detach()
        return rewards, torch.zeros(len(rewards), dtype=torch.int64, device=rewards.device)


def _refuse_learnt_prompts(model: Any) -> None:
    """Raise ConfigError if prompts are embedded before each row: a classifier of transformers then gets no ids, and
    reads the reward of a shorter row at its padding.
    """
    if predicts_first_labels(model):
        fix = (
            "the model gets embeddings instead of tokens, so rewards would be read at the padding of shorter rows; "
            "train a LoRA adapter or learnt prefixes"
        )
        raise ConfigError(Problem("peft_config", model.active_peft_config.peft_type.value, fix))
