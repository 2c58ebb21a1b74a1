"""The methods of a Trainer that a script may override and a run calls, bound for one call."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from windlass.assemble.rules import NEVER_CALLED
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import EvaluationPlan
from windlass.core.clock import Moment
from windlass.core.logs import get_logger, warn_once
from windlass.engine.evaluate import Evaluation
from windlass.trainer.evaluator import Evaluator
from windlass.trainer.loss_policy import LossHooks
from windlass.transforms.strategy import Strategy

if TYPE_CHECKING:  # the class whose methods are bound here; nothing below knows it
    from windlass.trainer.trainer import Trainer

logger = get_logger(__name__)

WriteModel = Callable[[Path, Mapping[str, Any] | None], None]
_MULTI_LABEL = "multi_label_classification"


TrainingStep = Callable[[Any, Tensor | None], None]
NotingLoss = Callable[[Callable[[Any], None]], AbstractContextManager[None]]

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


def loss_hooks(trainer: Trainer, owner: type) -> LossHooks:
    """The hooks of a loss. `owner` is the class whose methods are the defaults."""
    return LossHooks(
        model=trainer.model,
        compute_loss=trainer.compute_loss,
        training_step=trainer.training_step,
        count_targets=trainer.count_targets,
        prepare_inputs=trainer._prepare_inputs,
        own_items=bool(overrides(trainer, owner, "_prepare_input")),
        autocast=trainer.autocast_smart_context_manager,
        function=trainer.compute_loss_func,
        default_loss=not overrides(trainer, owner, "compute_loss"),
        default_step=not overrides(trainer, owner, "training_step"),
        default_count=not overrides(trainer, owner, "count_targets"),
        smoothing=smoothing_of(trainer.args, trainer.model),
        lean=trainer.args.lean_loss,
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
        get_train_dataloader, data_facts, evaluate: the methods of these names.
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
    data_facts: Callable[[], Mapping[str, Any]]
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
        cls, trainer: Trainer, owner: type, ignore_keys: list[str] | None, evaluator: Evaluator,
        evaluations: EvaluationPlan,
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
            metrics: dict[str, float] = {}
            loss_only = True if trainer.compute_metrics is None else None
            for name, make_loader in _evaluation_loaders(trainer).items():
                prefix = f"eval_{name}" if name else "eval"
                one = evaluation_of(trainer, evaluations, strategy, None, prefix=prefix, loss_only=loss_only)
                metrics.update(evaluator.rehearse(make_loader(), one, wanted))
            return metrics

        def may_save_in_background() -> bool:
            own = overrides(trainer, owner, "_save_checkpoint", "_save", "save_model")
            return not own and not trainer.callback_handler.listens_outside("on_save")

        return cls(
            model=trainer.model,
            get_train_dataloader=trainer.get_train_dataloader,
            data_facts=trainer.data_facts,
            create_optimizer=create_optimizer,
            training_step=trainer.run_micro_step,
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


def _save_checkpoint(trainer: Trainer) -> Callable[[], None]:
    parameters = inspect.signature(trainer._save_checkpoint).parameters.values()
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    trial = (None,) * (len(required) - 1)  # overrides of older scripts take `(model, trial)`

    return lambda: trainer._save_checkpoint(trainer.model, *trial)


def _log(trainer: Trainer) -> Callable[[dict[str, Any], Moment | None], None]:
    takes_start = len(inspect.signature(trainer.log).parameters) > 1  # older overrides do not

    def log(logs: dict[str, Any], started: Moment | None) -> None:
        if takes_start and started is not None:
            trainer.log(logs, started)
        else:
            trainer.log(logs)

    return log


@contextlib.contextmanager
def _noting_loss(trainer: Trainer, note: Callable[[Any], None]) -> Iterator[None]:
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


def evaluation_of(
    trainer: Trainer,
    plan: EvaluationPlan,
    strategy: Strategy,
    ignore_keys: list[str] | None,
    *,
    prefix: str = "eval",
    loss_only: bool | None = None,
    predicting: bool = False,
) -> Evaluation:
    """An evaluation of the Trainer's model.

    Args:
        ignore_keys: keys of the model's output that are not predictions.
        loss_only: keep nothing but the loss; None: as in the plan.
    """
    metrics = trainer.compute_metrics
    keeps_nothing = plan.loss_only if loss_only is None else loss_only
    if keeps_nothing and plan.loss_only and metrics is not None:
        warn_once(logger, "prediction_loss_only=True keeps no predictions, so compute_metrics is not called")

    def predict(batch: Any) -> tuple[Any, Any, Any]:
        return trainer.prediction_step(trainer.model, batch, keeps_nothing, ignore_keys=ignore_keys)

    return Evaluation(
        strategy,
        predict,
        trainer.count_targets,
        plan,
        trainer.label_names,
        in_step=strategy.sharded or trainer.accelerator.forwards_meet,
        compute_metrics=None if keeps_nothing else metrics,
        preprocess_logits=trainer.preprocess_logits_for_metrics,
        prefix=prefix,
        loss_only=keeps_nothing,
        predicting=predicting,
    )


def _evaluation_loaders(trainer: Trainer) -> dict[str, Callable[[], Any]]:
    """Functions that make the loader of each evaluation set, by name; "" is the only one."""
    if not isinstance(trainer.eval_dataset, Mapping):
        return {"": lambda: trainer.get_eval_dataloader(None)}
    return {
        name: lambda chosen=name: trainer.get_eval_dataloader(chosen)  # type: ignore[misc]
        for name in trainer.eval_dataset
    }
