"""What every part of the Trainer may rely on: its attributes, in one place, without behaviour."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.engine import TrainerEngine
from windlass.assemble.batch import UpdateSize
from windlass.callbacks.handler import CallbackHandler
from windlass.config.arguments import TrainingArguments
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.locations import local_folder
from windlass.core.world import World
from windlass.dist.gang import Gang
from windlass.engine.normalise import Normaliser
from windlass.engine.splitting import Kind
from windlass.metrics.tokens import TargetCounter
from windlass.transforms.strategy import Strategy


class TrainerBase:
    """Attributes of a Trainer. `model` is the bare module, `model_wrapped` what forwards run through."""

    args: TrainingArguments
    model: nn.Module
    model_wrapped: nn.Module
    model_init: Callable[..., nn.Module] | None
    data_collator: Callable[[list[Any]], Any]
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    compute_loss_func: Callable[..., Any] | None
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None
    callback_handler: CallbackHandler
    control: TrainerControl
    state: TrainerState
    accelerator: Accelerator
    _loop_engine: TrainerEngine
    label_names: list[str]
    can_return_loss: bool
    is_in_train: bool
    place_model_on_device: bool

    # None: found out by experiment on the first batch. True: `compute_loss` is already normalised over the update
    # and the ranks. False: it is a plain mean over its micro-batch.
    loss_is_scaled_for_ga: bool | None = None

    # Ctrl-C was pressed: save at the next point between two updates, where the loop's position is whole.
    _interrupted = False
    # It was pressed in this run: an epoch that is left early ends in the run that resumes, with its events.
    _resumes_within_epoch = False
    _wants_stop = False
    # A scheduler told this process to leave; all of them know that it told one.
    _told_to_leave = False
    _leaving = False
    # An evaluation of the run, between whose batches it hears of what goes on.
    _evaluates_for_run = False
    _autocast: Callable[[], AbstractContextManager[Any]]
    _overridden: frozenset[str]
    _source_samples: int | None
    _world: World
    _gang: Gang
    _device: torch.device
    _counter: TargetCounter
    _normaliser: Normaliser
    _loss_probed: bool
    _strategy: Strategy
    _update_size: UpdateSize
    _signature_columns: list[str] | None

    # The largest batches that memory may hold, where `auto_find_batch_size` has found out; None: those asked for.
    _fits: int | None = None
    _eval_fits: int | None = None

    def _adopt_update_size(self, size: UpdateSize) -> None:
        raise NotImplementedError

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        raise NotImplementedError

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model's own loss divides by `num_items_in_batch`: by signature until it is measured."""
        return self._model_divides

    _model_divides: bool
    _loss_kind: Kind | None = None  # how the model's own loss adds up, once it is measured
    _saved_loss_kind: Kind | None = None
    _default_loss_scales: bool = False

    @property
    def tokenizer(self) -> Any:
        """The earlier name of `processing_class`."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    @property
    def output_folder(self) -> Path:
        """Where this run's files go on this machine: a staging folder where `output_dir` is a URL."""
        return local_folder(self.args.output_path)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self._world.is_local_main

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of the job."""
        return self._world.is_main


def overrides(instance: object, owner: type, names: tuple[str, ...]) -> frozenset[str]:
    """Which of these methods the instance's class (or the instance itself) replaced."""
    return frozenset(
        name
        for name in names
        if name in vars(instance) or getattr(type(instance), name, None) is not getattr(owner, name, None)
    )
