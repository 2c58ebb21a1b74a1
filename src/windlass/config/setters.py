"""The setters `args.set_training(...)`, `args.set_save(...)`, ...: each sets a topic and returns the arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Concatenate, ParamSpec, TypeVar

from windlass.config.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from windlass.config.sections.fields import Fields
from windlass.config.values import hints, members
from windlass.core.errors import ConfigError, Problem

_Args = TypeVar("_Args", bound="Setters")
_Given = ParamSpec("_Given")


def _sets(
    prefix: str = "", **fields: str
) -> Callable[
    [Callable[Concatenate[_Args, _Given], Mapping[str, Any]]], Callable[Concatenate[_Args, _Given], _Args]
]:
    """Make a setter of a method which returns the values of further fields.

    Args:
        prefix: stands before the name of a parameter in that of its field.
        fields: parameter -> field, where that is not so.
    """

    def decorate(
        others: Callable[Concatenate[_Args, _Given], Mapping[str, Any]],
    ) -> Callable[Concatenate[_Args, _Given], _Args]:
        signature = inspect.signature(others)
        names = {word: fields.get(word, prefix + word) for word in [*signature.parameters][1:]}

        @functools.wraps(others)
        def set_fields(self: _Args, /, *args: _Given.args, **given: _Given.kwargs) -> _Args:
            bound = signature.bind(self, *args, **given)
            bound.apply_defaults()
            said = {word: bound.arguments[word] for word in names}
            if said.get("strategy") == "steps" and said["steps"] == 0:
                raise ConfigError(Problem("steps", 0, "must be above 0 with strategy='steps'"))
            values = {names[word]: value for word, value in said.items()}
            for name, value in {**values, **others(self, *args, **given)}.items():
                kind = members(hints(Fields)[name])[0]
                setattr(self, name, kind(value) if issubclass(kind, Enum) else value)
            return self

        sets = ", ".join(f"`{name}`" + f" (from `{word}`)" * (name != word) for word, name in names.items())
        set_fields.__doc__ = f"""{others.__doc__} Arguments left out set the defaults shown here.

        It sets {sets}.

        Raises:
            ConfigError: a strategy of "steps" with 0 `steps`. ValueError: a word that its field does not have.
        """
        vars(set_fields)["__signature__"] = signature.replace(return_annotation="Self")
        return set_fields

    return decorate


class Setters:
    """A mixin of `TrainingArguments`, which are checked as a whole when a run starts."""

    @_sets(
        batch_size="per_device_train_batch_size",
        num_epochs="num_train_epochs",
        gradient_checkpointing="activation_checkpointing",
    )
    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> Mapping[str, Any]:
        """Set `do_train` and the main options of training. `gradient_checkpointing`, the earlier name of
        `activation_checkpointing`, replaces it unless it is None.
        """
        recompute = activation_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        return {"do_train": True, "activation_checkpointing": recompute}

    @_sets("eval_", batch_size="per_device_eval_batch_size", loss_only="prediction_loss_only")
    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Mapping[str, Any]:
        """Set when and how to evaluate during training, and `do_eval` to whether there is a strategy."""
        return {"do_eval": strategy != "no", "eval_delay": 0 if delay is None else delay}

    @_sets(batch_size="per_device_eval_batch_size", loss_only="prediction_loss_only")
    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Mapping[str, Any]:
        """Set `do_predict`, and how to predict."""
        return {"do_predict": True}

    @_sets("save_")
    def set_save(
        self,
        strategy: str | SaveStrategy | IntervalStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Mapping[str, Any]:
        """Set when checkpoints are written and how many are kept."""
        return {}

    @_sets(
        "logging_",
        report_to="report_to",
        level="log_level",
        on_each_node="log_on_each_node",
        replica_level="log_level_replica",
    )
    def set_logging(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Mapping[str, Any]:
        """Set when, where and at which level to log."""
        return {}

    @_sets("hub_")
    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Mapping[str, Any]:
        """Set `push_to_hub`, and where and when to publish the model."""
        return {"push_to_hub": True}

    @_sets(
        "adam_", name="optim", learning_rate="learning_rate", weight_decay="weight_decay", args="optim_args"
    )
    def set_optimizer(
        self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Mapping[str, Any]:
        """Set the optimizer and its options."""
        return {}

    @_sets(name="lr_scheduler_type", num_epochs="num_train_epochs")
    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
    ) -> Mapping[str, Any]:
        """Set the schedule and its length."""
        return {}

    @_sets(
        "dataloader_",
        train_batch_size="per_device_train_batch_size",
        eval_batch_size="per_device_eval_batch_size",
        auto_find_batch_size="auto_find_batch_size",
        ignore_data_skip="ignore_data_skip",
        sampler_seed="data_seed",
    )
    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Mapping[str, Any]:
        """Set how data is loaded."""
        return {}
