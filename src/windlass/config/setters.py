"""The setters `args.set_training(...)`, `args.set_save(...)`, ...: each sets a topic and returns the arguments."""

from __future__ import annotations

from typing import Any, Self

from windlass.config.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from windlass.core.errors import ConfigError, Problem


def _stride(strategy: Any, steps: float) -> None:
    if strategy == "steps" and steps == 0:
        raise ConfigError(Problem("steps", steps, "must be above 0 with strategy='steps'"))


class Setters:
    """A mixin of `TrainingArguments`, which are checked as a whole when a run starts."""

    def _set(self, **values: Any) -> Self:
        for name, value in values.items():
            setattr(self, name, value)
        return self

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
    ) -> Self:
        """Set `do_train` and the main options of training. Arguments left out set the defaults shown here.

        `learning_rate`, `weight_decay`, `max_steps`, `gradient_accumulation_steps` and `seed` set the fields of these
        names, `batch_size` sets `per_device_train_batch_size`, and `num_epochs` sets `num_train_epochs`.
        `activation_checkpointing` sets the field of this name; `gradient_checkpointing`, its earlier name, replaces it
        unless it is None.
        """
        recompute = activation_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=recompute,
        )

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Self:
        """Set when and how to evaluate during training. Arguments left out set the defaults shown here.

        `strategy`, `steps`, `accumulation_steps` and `delay` set the fields of these names with `eval_` before them (a
        `delay` of None is 0), `batch_size` sets `per_device_eval_batch_size`, and `loss_only` sets
        `prediction_loss_only`. `do_eval` is set to whether there is a strategy.

        Raises:
            ConfigError: a strategy of "steps" with 0 `steps`.
        """
        _stride(strategy, steps)
        return self._set(
            eval_strategy=IntervalStrategy(strategy),
            do_eval=strategy != "no",
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=0 if delay is None else delay,
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Set `do_predict`, `per_device_eval_batch_size` (from `batch_size`) and `prediction_loss_only` (from
        `loss_only`). Arguments left out set the defaults shown here.
        """
        return self._set(
            do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only
        )

    def set_save(
        self,
        strategy: str | SaveStrategy | IntervalStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set when checkpoints are written and how many are kept. Arguments left out set the defaults shown here.

        `strategy`, `steps`, `total_limit` and `on_each_node` set the fields of these names with `save_` before them.

        Raises:
            ConfigError: a strategy of "steps" with 0 `steps`.
        """
        _stride(strategy, steps)
        return self._set(
            save_strategy=SaveStrategy(str(strategy)),
            save_steps=steps,
            save_total_limit=total_limit,
            save_on_each_node=on_each_node,
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
    ) -> Self:
        """Set when, where and at which level to log. Arguments left out set the defaults shown here.

        `strategy`, `steps`, `first_step` and `nan_inf_filter` set the fields of these names with `logging_` before
        them, `report_to` its own, `level` sets `log_level`, `on_each_node` sets `log_on_each_node`, and `replica_level`
        sets `log_level_replica`.

        Raises:
            ConfigError: a strategy of "steps" with 0 `steps`.
        """
        _stride(strategy, steps)
        return self._set(
            logging_strategy=IntervalStrategy(strategy),
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Set `push_to_hub`, and where and when to publish the model. Arguments left out set the defaults shown here.

        `model_id`, `strategy`, `token`, `private_repo`, `always_push` and `revision` set the fields of these names with
        `hub_` before them.
        """
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=HubStrategy(strategy),
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
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
    ) -> Self:
        """Set the optimizer and its options. Arguments left out set the defaults shown here.

        `learning_rate` and `weight_decay` set the fields of these names, `beta1`, `beta2` and `epsilon` those with
        `adam_` before them, `name` sets `optim`, and `args` sets `optim_args`.
        """
        return self._set(
            optim=OptimizerNames(name),
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
    ) -> Self:
        """Set the schedule and its length. Arguments left out set the defaults shown here.

        `max_steps` and `warmup_steps` set the fields of these names, `name` sets `lr_scheduler_type`, and `num_epochs`
        sets `num_train_epochs`.
        """
        return self._set(
            lr_scheduler_type=SchedulerType(name),
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            warmup_steps=warmup_steps,
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
    ) -> Self:
        """Set how data is loaded. Arguments left out set the defaults shown here.

        `train_batch_size` and `eval_batch_size` set `per_device_train_batch_size` and `per_device_eval_batch_size`.
        `drop_last`, `num_workers`, `pin_memory`, `persistent_workers`, `prefetch_factor`, `multiprocessing_context` and
        `in_order` set the fields of these names with `dataloader_` before them, `auto_find_batch_size` and
        `ignore_data_skip` their own, and `sampler_seed` sets `data_seed`.
        """
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )
