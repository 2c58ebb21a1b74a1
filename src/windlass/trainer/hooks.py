"""The methods of a Trainer that a script may override and a run calls, bound for one call."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from windlass.accelerator.accelerator import Accelerator
from windlass.assemble.resolve import NEVER_CALLED, resolve_evaluation
from windlass.callbacks.handler import CallbackHandler
from windlass.config.arguments import TrainingArguments
from windlass.core.clock import Moment
from windlass.trainer.checkpointer import WriteModel
from windlass.trainer.evaluator import EvalHooks, Evaluator
from windlass.trainer.loss_policy import LossHooks
from windlass.trainer.losses import takes
from windlass.trainer.micro_steps import NotingLoss, TrainingStep
from windlass.transforms.strategy import Strategy

_MULTI_LABEL = "multi_label_classification"


class Overridable(Protocol):
    """The attributes and methods of `Trainer` that hooks use, and that a subclass or a script may replace."""

    args: TrainingArguments
    model: nn.Module
    model_wrapped: nn.Module
    accelerator: Accelerator
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    train_dataset: Any
    eval_dataset: Any
    is_in_train: bool
    compute_loss_func: Callable[..., Any] | None
    compute_metrics: Callable[..., Any] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    label_names: list[str]
    loss_is_scaled_for_ga: bool | None

    @property
    def callback_handler(self) -> CallbackHandler: ...

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor: ...

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any: ...

    def count_targets(self, batch: Any) -> float: ...

    def autocast_smart_context_manager(self) -> AbstractContextManager[Any]: ...

    def get_train_dataloader(self) -> Any: ...

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any: ...

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None: ...

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None
    ) -> dict[str, float]: ...

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None: ...

    def _prepare_inputs(self, inputs: Any) -> Any: ...

    def _determine_best_metric(self, metrics: dict[str, float]) -> bool: ...

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None: ...

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]: ...

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None: ...

    def _load_from_checkpoint(self, resume_from_checkpoint: str) -> None: ...

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None: ...

    def _load_best_model(self) -> None: ...


# Overrides of these methods change the plan.
WATCHED = (
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_train_sampler", "_get_eval_sampler",
    "_get_dataloader", "evaluate", "evaluation_loop", *NEVER_CALLED,
)  # fmt: skip


def overrides(instance: object, owner: type, *names: str) -> frozenset[str]:
    """The methods of these names that the instance's class, or the instance itself, replaces."""
    return frozenset(
        name
        for name in names
        if name in vars(instance) or getattr(type(instance), name, None) is not getattr(owner, name, None)
    )


def replaced(instance: object, *names: str) -> frozenset[str]:
    """The methods of these names that a script replaces, not one of Windlass's own trainers."""
    classes = type(instance).__mro__
    owners = {name: next((cls for cls in classes if name in vars(cls)), object) for name in names}
    return frozenset(
        name
        for name, owner in owners.items()
        if name in vars(instance) or (owner is not object and not owner.__module__.startswith("windlass."))
    )


def loss_hooks(trainer: Overridable, owner: type) -> LossHooks:
    """The hooks of a loss. `owner` is the class whose methods are the defaults."""
    return LossHooks(
        model=trainer.model,
        compute_loss=trainer.compute_loss,
        training_step=trainer.training_step,
        count_targets=trainer.count_targets,
        prepare_inputs=trainer._prepare_inputs,
        autocast=trainer.autocast_smart_context_manager,
        function=trainer.compute_loss_func,
        default_loss=not overrides(trainer, owner, "compute_loss"),
        default_step=not overrides(trainer, owner, "training_step"),
        default_count=not overrides(trainer, owner, "count_targets"),
        smoothing=smoothing_of(trainer.args, trainer.model),
        compiled=bool(trainer.args.torch_compile) or hasattr(trainer.model, "_orig_mod"),
        declared=trainer.loss_is_scaled_for_ga,
    )


def smoothing_of(args: TrainingArguments, model: nn.Module) -> float:
    """`label_smoothing_factor`, or 0 for a model of independent labels, which it does not apply to."""
    factor = args.label_smoothing_factor
    if factor and getattr(getattr(model, "config", None), "problem_type", None) == _MULTI_LABEL:
        warnings.warn(
            f"label_smoothing_factor={factor} is not used: the model's problem_type is {_MULTI_LABEL!r}",
            stacklevel=2,
        )
        return 0.0
    return factor


@dataclass(frozen=True, slots=True)
class TrainHooks:
    """The hooks of a run.

    Attributes:
        model: the bare model.
        get_train_dataloader, evaluate: the methods of these names.
        create_optimizer: number of updates -> optimizer and scheduler, by `create_optimizer_and_scheduler`.
        training_step: `training_step` on one micro-batch, with the target count that it gets or None.
        noting_loss: context in which `compute_loss` reports its return values.
        log: `log`, with the moment at which training began.
        judge: `_determine_best_metric`: records the metrics of an evaluation; returns True if it is the best so far.
        rehearse: metrics of the first evaluation batches, for their names; None if a script overrides evaluation.
        save_checkpoint: `_save_checkpoint`.
        load_weights: `_load_from_checkpoint`, of a folder.
        load_best_model: `_load_best_model`.
        write_model: an overridden `_save`; None: the default.
        saves_own_way: a script's `_save` or `_save_checkpoint` takes part in saving.
        may_save_in_background: no code of the script takes part in saving and needs the state of the run at that time.
        overridden: the replaced methods that change the plan.
        has_evaluation_data: there is an evaluation set, or a method of the script's own that may return one.
    """

    model: nn.Module
    get_train_dataloader: Callable[[], Any]
    create_optimizer: Callable[[int], tuple[torch.optim.Optimizer | None, Any]]
    training_step: TrainingStep
    noting_loss: NotingLoss
    log: Callable[[dict[str, Any], Moment | None], None]
    evaluate: Callable[[], dict[str, float]]
    judge: Callable[[dict[str, float]], bool]
    rehearse: Callable[[str, Strategy], dict[str, float]] | None
    save_checkpoint: Callable[[], None]
    load_weights: Callable[[str], None]
    load_training_state: Callable[[str | None], None]
    load_best_model: Callable[[], None]
    write_model: WriteModel | None
    saves_own_way: bool
    may_save_in_background: Callable[[], bool]
    overridden: frozenset[str]
    has_evaluation_data: bool

    @classmethod
    def of(
        cls, trainer: Overridable, owner: type, ignore_keys: list[str] | None,
        evaluator: Evaluator,
    ) -> TrainHooks:  # fmt: skip
        """Bind the methods of a Trainer.

        Args:
            owner: the class whose methods are the defaults.
            ignore_keys: keys of the model's output that are not predictions.
        """
        overridden = replaced(trainer, *WATCHED)
        own_evaluation = overridden & {"get_eval_dataloader", "evaluate"}

        def create_optimizer(steps: int) -> tuple[torch.optim.Optimizer | None, Any]:
            trainer.create_optimizer_and_scheduler(num_training_steps=steps)
            return trainer.optimizer, trainer.lr_scheduler

        def write_model(folder: Path, gathered: Mapping[str, Any] | None) -> None:
            # Overrides written without sharding in mind take only the folder.
            if gathered is None:
                trainer._save(str(folder))
            else:
                trainer._save(str(folder), state_dict=gathered)

        def rehearse(wanted: str, strategy: Strategy) -> dict[str, float]:
            loaders, bound = _evaluation_loaders(trainer), eval_hooks(trainer, strategy, None)
            return evaluator.rehearse(loaders, bound, resolve_evaluation(trainer.args), wanted)

        def may_save_in_background() -> bool:
            own = overrides(trainer, owner, "_save_checkpoint", "_save", "save_model")
            return not own and not trainer.callback_handler.listens_outside("on_save")

        return cls(
            model=trainer.model,
            get_train_dataloader=trainer.get_train_dataloader,
            create_optimizer=create_optimizer,
            training_step=_training_step(trainer),
            noting_loss=lambda note: _noting_loss(trainer, note),
            log=_log(trainer),
            evaluate=lambda: trainer.evaluate(ignore_keys=ignore_keys),
            judge=lambda metrics: trainer._determine_best_metric(metrics),
            rehearse=None if overrides(trainer, owner, "evaluate", "evaluation_loop") else rehearse,
            save_checkpoint=_save_checkpoint(trainer),
            load_weights=lambda folder: trainer._load_from_checkpoint(folder),
            load_training_state=trainer._load_optimizer_and_scheduler,
            load_best_model=lambda: trainer._load_best_model(),
            write_model=write_model if overrides(trainer, owner, "_save") else None,
            saves_own_way=bool(overrides(trainer, owner, "_save_checkpoint", "_save")),
            may_save_in_background=may_save_in_background,
            overridden=overridden,
            has_evaluation_data=trainer.eval_dataset is not None or bool(own_evaluation),
        )


def _training_step(trainer: Overridable) -> TrainingStep:
    takes_count = takes(trainer.training_step, "num_items_in_batch")

    def step(batch: Any, count: Tensor | None) -> None:
        if takes_count:
            trainer.training_step(trainer.model_wrapped, batch, num_items_in_batch=count)
        else:
            trainer.training_step(trainer.model_wrapped, batch)

    return step


def _save_checkpoint(trainer: Overridable) -> Callable[[], None]:
    parameters = inspect.signature(trainer._save_checkpoint).parameters.values()
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    trial = (None,) * (len(required) - 1)  # overrides of older scripts take `(model, trial)`

    return lambda: trainer._save_checkpoint(trainer.model, *trial)


def _log(trainer: Overridable) -> Callable[[dict[str, Any], Moment | None], None]:
    takes_start = len(inspect.signature(trainer.log).parameters) > 1  # older overrides do not

    def log(logs: dict[str, Any], started: Moment | None) -> None:
        if takes_start and started is not None:
            trainer.log(logs, started)
        else:
            trainer.log(logs)

    return log


@contextlib.contextmanager
def _noting_loss(trainer: Overridable, note: Callable[[Any], None]) -> Iterator[None]:
    """Within the body, call `note` with each value that `compute_loss` returns."""
    compute_loss, attributes = trainer.compute_loss, vars(trainer)
    own = attributes.get("compute_loss")

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = compute_loss(*args, **kwargs)
        note(result)
        return result

    attributes["compute_loss"] = noted
    try:
        yield
    finally:
        del attributes["compute_loss"]
        if own is not None:
            attributes["compute_loss"] = own


def eval_hooks(trainer: Overridable, strategy: Strategy, ignore_keys: list[str] | None) -> EvalHooks:
    """The hooks of an evaluation. `ignore_keys` are keys of the model's output that are not predictions."""

    def predict(batch: Any, loss_only: bool) -> tuple[Any, Any, Any]:
        return trainer.prediction_step(trainer.model, batch, loss_only, ignore_keys=ignore_keys)

    in_step = strategy.sharded or trainer.accelerator.forwards_meet
    return EvalHooks(
        trainer.model, strategy, in_step, predict, trainer.count_targets, trainer.label_names,
        trainer.compute_metrics, trainer.preprocess_logits_for_metrics,
    )  # fmt: skip


def _evaluation_loaders(trainer: Overridable) -> dict[str, Callable[[], Any]]:
    """Functions that make the loader of each evaluation set, by name; "" is the only one."""
    if not isinstance(trainer.eval_dataset, Mapping):
        return {"": lambda: trainer.get_eval_dataloader(None)}
    return {
        name: lambda chosen=name: trainer.get_eval_dataloader(chosen)  # type: ignore[misc]
        for name in trainer.eval_dataset
    }
