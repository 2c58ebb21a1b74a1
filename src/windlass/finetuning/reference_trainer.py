"""`ReferenceTrainer`: what trainers that compare a model with a reference have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.errors import CheckpointError, ConfigError, ModelError, Problem, refuse
from windlass.core.events import TrainerState
from windlass.core.types import State
from windlass.dist.sharded import local, part
from windlass.finetuning.fine_tuner import FineTuner
from windlass.finetuning.frozen_reference import (
    FirstModel,
    ReferencePass,
    SecondModel,
    choose_reference,
    model_hash,
    rounding_of_device,
)
from windlass.finetuning.peft_adapters import is_peft_model
from windlass.finetuning.preference_data import PreferenceData
from windlass.finetuning.reference_config import ReferenceConfig
from windlass.finetuning.sft_checks import router_coefficient
from windlass.finetuning.skipped_overrides import check_overrides
from windlass.finetuning.tuned_model import begin_tuning, open_tuned_model
from windlass.precision.check import COMPUTE_DTYPES
from windlass.text.pair_encoder import PairRows
from windlass.trainer.hooks import replaced
from windlass.trainer.instead import takes_place
from windlass.trainer.services import spread_in_stages
from windlass.transforms.model_limits import ModelLimits
from windlass.transforms.staged_model import staged_of


class SyncRefModelCallback(TrainerCallback):
    """After every `ref_model_sync_steps` updates the reference becomes `alpha * model + (1 - alpha) * reference`, with
    `ref_model_mixup_alpha`.

    Args:
        ref_model: the reference, which is divided over ranks as the model is.
        accelerator: unwraps the model.
    """

    def __init__(self, ref_model: nn.Module, accelerator: Any) -> None:
        self.ref_model, self.accelerator = ref_model, accelerator

    def on_train_begin(
        self, args: Args, state: TrainerState, control: Control, model: Any = None, **kwargs: Any
    ) -> None:
        """Raise ModelError before the first update if no later one could move the reference."""
        check_divided_alike(
            self.accelerator.unwrap_model(self.ref_model), self.accelerator.unwrap_model(model)
        )

    def on_step_end(
        self, args: Args, state: TrainerState, control: Control, model: Any = None, **kwargs: Any
    ) -> None:
        steps, alpha = getattr(args, "ref_model_sync_steps", 512), getattr(args, "ref_model_mixup_alpha", 0.6)
        if state.global_step % steps == 0:
            move_towards(
                self.accelerator.unwrap_model(self.ref_model), self.accelerator.unwrap_model(model), alpha
            )


def check_divided_alike(reference: nn.Module, model: nn.Module) -> None:
    """Raise ModelError if the parameters of two models are divided over ranks in different ways."""
    for own, other in zip(reference.parameters(), model.parameters(), strict=True):
        if own.shape != other.shape or type(own.data) is not type(other.data):
            raise ModelError(
                "sync_ref_model=True: the reference is not divided over ranks as the model is, so it cannot be moved; "
                "train without it, or without tp_size and ep_size"
            )


@torch.no_grad()
def move_towards(reference: nn.Module, model: nn.Module, alpha: float) -> None:
    """Mix a share `alpha` of the parameters of `model` into those of `reference`, which is divided as `model` is."""
    for own, other in zip(reference.parameters(), model.parameters(), strict=True):
        own.data.mul_(1.0 - alpha).add_(other.data.to(own.dtype), alpha=alpha)


Config = TypeVar("Config", bound=ReferenceConfig)


class ReferenceTrainer(FineTuner, Generic[Config]):
    """A `FineTuner` with a reference, whose log-probabilities may be computed once.

    Attributes:
        ref_model: the reference, if it is a second model.
        CONFIG: the class of its arguments.
        REFERENCE_COLUMNS: of precomputed log-probabilities, one for each answer of a row.
    """

    args: Config
    CONFIG: type[Config]
    REFERENCE_COLUMNS: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: Any,
        ref_model: nn.Module | None = None,
        args: Config | TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        check_overrides(self, self.CALLED)
        args = begin_tuning(self.CONFIG, args, model, train_dataset)
        own_collator = data_collator is not None
        self._check_passed(args, own_collator=own_collator, has_metrics=compute_metrics is not None)
        base = open_tuned_model(model, args, processing_class, quantization_config, peft_config)
        self._router_weight = router_coefficient(args.router_aux_loss_coef, base.model)
        self._choice = choose_reference(ref_model, base, args, had_adapter=is_peft_model(model))
        self._data = self.preparation(args, base.tokenizer, ModelLimits.of(base.model))
        super().__init__(
            base.model,
            args,
            data_collator or self._collator(args, base.tokenizer.pad_token_id),
            self._data.prepare(train_dataset, "train"),
            None if eval_dataset is None else self._data.prepare_all(eval_dataset),
            base.processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self._begin_loss()
        self._begin_reference(own_collator=own_collator)

    @classmethod
    def preparation(cls, args: Config, tokenizer: Any, limits: ModelLimits) -> PreferenceData:
        """Return what prepares datasets by `args`, with `tokenizer`, for a model with `limits`."""
        raise NotImplementedError

    def _check_passed(self, args: Config, *, own_collator: bool, has_metrics: bool) -> None:
        """Raise ConfigError if `args` contradict what a script passes; by default nothing does."""

    def _collator(self, args: Config, pad_token_id: int) -> Callable[[list[Any]], Any]:
        """What makes batches of samples unless a script passes it."""
        raise NotImplementedError

    def _begin_loss(self) -> None:
        """Called once the Trainer is made: begin its reports, and set what its loss is normalised by."""
        raise NotImplementedError

    def _begin_reference(self, *, own_collator: bool) -> None:
        """Put the reference on the devices of the run, and compute what training needs of it if that is asked for.
        Collective.
        """
        self.can_return_loss, self.label_names = True, []
        choice, own_pass = self._choice, own_collator or replaced(self, "compute_ref_log_probs")
        self._key = None if own_pass else self._settings_key()
        if self._engine.dist.pipeline is not None:
            refuse(self.args.stage_problems())
        computes = self.args.precompute_ref_log_probs and not takes_place()
        self._source_hash = self._hash_of(choice.source) if computes else None
        divided = self.is_fsdp_enabled or self.is_deepspeed_enabled
        self._divide_in_stages()
        self._reference = choice.prepared(self.accelerator, self._in_stages, sharded=divided)
        self.ref_model = self._reference.module if isinstance(self._reference, SecondModel) else None
        dtype = COMPUTE_DTYPES.get(self._plan.precision.compute)
        if self.ref_model is not None and self.is_deepspeed_enabled and dtype is not None:
            # As the engine converts the model, from which its own copy would differ before the first update.
            for parameter in filter(Tensor.is_floating_point, self.ref_model.parameters()):
                parameter.data = parameter.data.to(dtype)
        if self.args.precompute_ref_log_probs:
            self._add_reference_to_datasets()
            if choice.given is None and self.ref_model is not None:  # a copy that training does not need
                self._reference, self.ref_model = FirstModel(), None
        elif self.args.sync_ref_model:
            assert self.ref_model is not None  # checked before
            self.accelerator.register_for_checkpointing(ReferenceState(self.ref_model))
            self.add_callback(SyncRefModelCallback(self.ref_model, self.accelerator))

    def _in_stages(self, model: nn.Module) -> bool:
        """Divide a reference into stages if the model is; return False if it is not. Collective."""
        spread_in_stages(model, self._engine, self._session)
        return staged_of(model) is not None

    def _hash_of(self, source: nn.Module) -> str | None:
        """That of the main process, whose weights all get."""
        own = model_hash(source) if self.is_world_process_zero() else None
        found: str | None = self._session.all_ranks.broadcast_object(own)
        return found

    def _settings_key(self) -> str:
        args = self.args
        chosen = (args.max_length, getattr(args, "truncation_mode", ""), getattr(args, "ld_alpha", None))
        rows = (args.precompute_ref_batch_size, getattr(args, "padding_free", False))
        attention = getattr(getattr(self._choice.source, "config", None), "_attn_implementation", None)
        computed = (self._plan.precision, args.qat, attention)
        # With what ranks of another layout rounded and kept, a run would not have its own bits a second time.
        ranks = (self._engine.dist, self._session.all_ranks.size, *rounding_of_device(self._session.device))
        return repr((type(self).__name__, *chosen, *rows, *computed, *ranks))

    def _add_reference_to_datasets(self) -> None:
        train, size = self.args.per_device_train_batch_size, self.args.precompute_ref_batch_size
        self.train_dataset = self._with_reference(self.train_dataset, "train_dataset", size or train)
        if self.eval_dataset is not None:
            self.eval_dataset = self._evaluated_with_reference(self.eval_dataset)

    def _evaluated_with_reference(self, datasets: Any) -> Any:
        """The same for one evaluation dataset, or each of a dict of them."""
        if isinstance(datasets, Mapping):
            return {name: self._evaluated_with_reference(rows) for name, rows in datasets.items()}
        size = self.args.precompute_ref_batch_size or self.args.per_device_eval_batch_size
        return self._with_reference(datasets, "eval_dataset", size)

    def _with_reference(self, rows: Any, name: str, batch_size: int) -> Any:
        """`rows` with the log-probabilities of the reference. Collective."""
        if not isinstance(rows, PairRows):
            fix = "needs rows that can be counted, prepared by this trainer; a stream has none. Leave it out"
            raise ConfigError(Problem("precompute_ref_log_probs", True, f"{fix} ({name})"))
        if set(self.REFERENCE_COLUMNS) <= set(rows.numbers):
            return rows
        if takes_place():  # the reference has weights without values
            for column in self.REFERENCE_COLUMNS:
                rows = rows.with_numbers(column, np.zeros(len(rows)))
            return rows
        key = None
        if self._key is not None and self._source_hash is not None:
            key = hashlib.sha256(f"{self._key} {self._source_hash} {batch_size}".encode()).hexdigest()
        compute: Callable[[Any], Tensor] = self._reference_sums
        return ReferencePass(
            self.accelerator, self._session.all_ranks, compute, self.data_collator, batch_size, key
        ).add_to(rows, self.REFERENCE_COLUMNS)

    def _reference_sums(self, batch: Any) -> Tensor:
        """The log-probability of each sequence of a batch on the host, under the reference."""
        with self.compute_loss_context_manager():
            return self._reference.log_probabilities(self.model, self._prepare_inputs(batch))

    def _prepared(self, datasets: Any) -> Any:
        found = super()._prepared(datasets)
        if not self.args.precompute_ref_log_probs:
            return found
        if isinstance(self._reference, FirstModel) and self.state.global_step:
            fix = (
                "the reference was the model before training, which is gone: pass this dataset to the constructor, or "
                "a ref_model, or set precompute_ref_log_probs=False"
            )
            raise ConfigError(Problem("eval_dataset", type(datasets).__name__, fix))
        return self._evaluated_with_reference(found)


class ReferenceState:
    """The weights of a reference that moves, as each rank holds them, for checkpoints.

    Args:
        model: prepared for the devices of the run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> State:
        return {str(at): local(parameter) for at, parameter in enumerate(self._model.parameters())}

    def is_divided_as(self, state: State) -> bool:
        """Return True if this rank has as much of each weight as the one that saved `state`."""
        return all(
            local(parameter).shape == state[str(at)].shape
            for at, parameter in enumerate(self._model.parameters())
        )

    def load_state_dict(self, state: State) -> None:
        with torch.no_grad():
            for at, parameter in enumerate(self._model.parameters()):
                local(parameter).copy_(state[str(at)])

    def adopt(self, states: list[State]) -> None:
        """Restore the weights of a run whose ranks had other parts of them. Raises CheckpointError if they had neither
        whole weights nor rows of them one behind another.
        """
        with torch.no_grad():
            for at, parameter in enumerate(self._model.parameters()):
                saved = [state[str(at)] for state in states]
                value = saved[0] if saved[0].shape == parameter.shape else torch.cat(saved)
                if value.shape != parameter.shape:
                    raise CheckpointError(
                        f"the reference of sync_ref_model was saved by {len(states)} ranks in a layout that cannot be "
                        "put together here; resume on as many ranks, with the same sharding"
                    )
                local(parameter).copy_(part(parameter).of(value))
