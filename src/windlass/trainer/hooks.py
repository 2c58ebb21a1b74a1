"""The methods of a Trainer that a script may override and a run calls."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from windlass.accelerator.saved_parts import Generators
from windlass.config.plan import EvaluationPlan
from windlass.core.attributes import accepts, attributes_of, required_by_position
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.run_clock import Moment
from windlass.engine.evaluate import Evaluation
from windlass.trainer.drawn_samples import Draw
from windlass.trainer.evaluator import Evaluator
from windlass.trainer.loss_policy import LossHooks, LossSettings
from windlass.trainer.losses import smoothing_of
from windlass.trainer.model_writer import SavedByScript, WrittenBeside
from windlass.trainer.script_loss import calls_inherited, exchanges, names_in_code, names_in_versions
from windlass.trainer.uncalled import (
    BETWEEN,
    CALLED_AROUND,
    CLIP,
    CLIP_OF_ACCELERATOR,
    NEVER_CALLED,
    OF_ACCELERATOR,
    OF_ARGUMENTS,
    OTHER_ARGUMENTS,
    SAVED_PARTS,
    idle,
)
from windlass.transforms.context import has_divided_sequences
from windlass.transforms.strategy import Strategy

if TYPE_CHECKING:  # the class whose methods are bound here; nothing below knows it
    from windlass.trainer.trainer import Trainer

logger = get_job_logger(__name__)

TrainingStep = Callable[[Any, Tensor | None], Any]

# Overrides of these methods change the plan.
WATCHED = (
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_train_sampler", "_get_eval_sampler",
    "_get_dataloader", "evaluate", "evaluation_loop", "_load_rng_state", "_get_learning_rate", *CALLED_AROUND,
    BETWEEN, CLIP, *NEVER_CALLED,
)  # fmt: skip


def overrides(instance: object, owner: type, *names: str) -> frozenset[str]:
    """The methods of these names that are not those of `owner`: replaced in a subclass, on the instance, or by a script
    that assigns to the class.
    """
    kind = type(instance)
    inherited = {name for name in names if getattr(kind, name, None) is getattr(owner, name, None)}
    return (frozenset(names) - inherited) | replaced(instance, *names)


def replaced(instance: object, *names: str) -> frozenset[str]:
    """The methods of these names that a script replaces: in a subclass, on the instance, or by assigning to a class of
    Windlass. An override in a class of Windlass is none.
    """
    return frozenset(name for name in names if name in vars(instance) or _is_foreign(type(instance), name))


def _is_foreign(cls: type, name: str) -> bool:
    value: Any = inspect.getattr_static(cls, name, None)
    if value is None:
        return False
    function: Any = getattr(value, "fget", None) or getattr(value, "__func__", value)
    # Not `__module__`, which `functools.wraps` copies from the method that a script wraps.
    where = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None)
    return not str(where).startswith("windlass.")


def uncalled_of(trainer: Trainer, owner: type[Trainer]) -> dict[str, str]:
    """The methods of a class derived from `owner` that no run would call, each with what to do instead."""
    copied = {name: fix for name, fix in CALLED_AROUND.items() if not calls_inherited(getattr(trainer, name))}
    if not accepts(trainer._maybe_log_save_evaluate, *(None,) * 7, learning_rate=None):
        copied[BETWEEN] = OTHER_ARGUMENTS
    unused = idle(trainer.args, owner.get_cp_size(trainer) * owner.get_sp_size(trainer) > 1)
    return {
        f"{prefix}{name}": known[name]
        for prefix, overriding, known in (
            (
                "",
                trainer,
                {name: fix for name, fix in {**NEVER_CALLED, **copied}.items() if name not in unused},
            ),
            ("args.", trainer.args, OF_ARGUMENTS),
            ("accelerator.", trainer.accelerator, OF_ACCELERATOR),
        )
        for name in sorted(replaced(overriding, *known))
    }


def around(trainer: Trainer, owner: type, name: str) -> Callable[..., Any]:
    """The script's override of a method of CALLED_AROUND; that of `owner` itself if it is to be refused."""
    method: Callable[..., Any] = getattr(trainer, name)
    return method if calls_inherited(method) else partial(getattr(owner, name), trainer)


def _inheriting(trainer: Trainer, **work: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Within the body, the inherited methods of these names do this work."""
    return attributes_of(trainer, inherited_work={**trainer.inherited_work, **work})


def wrap_model(trainer: Trainer, training: bool) -> None:
    """Call `_wrap_model`, where a script may change the model. Raises ConfigError if it returns another one."""
    # As transformers calls it: older overrides take no `training`.
    returned = trainer._wrap_model(trainer.model, **({} if training else {"training": False}))
    if returned is not trainer.model:
        fix = "the engine wraps the model itself: change it in place, or pass what this returns to the constructor"
        raise ConfigError(Problem("_wrap_model", f"returned {type(returned).__name__}", fix))


def absent_in_save(trainer: Trainer, owner: type) -> frozenset[str]:
    """The methods that an overridden `_save_checkpoint` calls and that do not exist, or save one part alone. Found
    before a run: the first save may be hours later. Warns where it may never call them.
    """
    save = trainer._save_checkpoint
    if not overrides(trainer, owner, "_save_checkpoint"):
        return frozenset()
    # Beside the inherited way to save, helpers are another way, which the script may never take.
    around = calls_inherited(save)
    named = names_in_versions(save) if around else names_in_code([save])
    parts = named.intersection(SAVED_PARTS)
    if around and parts:
        warn_once(
            logger,
            f"`_save_checkpoint` names {min(parts)}: if it saves by that, and not by the inherited "
            "`_save_checkpoint` alone, its first save fails",
        )
    absent = frozenset(name for name in named & NEVER_CALLED.keys() if not hasattr(trainer, name))
    return absent if around else absent | parts


def has_evaluation_data(trainer: Trainer) -> bool:
    """Return True if there is an evaluation set, or a method of the script's own that may return one."""
    return trainer.eval_dataset is not None or bool(replaced(trainer, "get_eval_dataloader", "evaluate"))


def evaluates_iterator(trainer: Trainer) -> bool:
    """Return True if an evaluation set is one of Python's iterators, which do not begin again."""
    sets = trainer.eval_dataset
    given = sets.values() if isinstance(sets, Mapping) else [sets]
    # Not `Iterator`: objects of a script whose __iter__ returns themselves may begin again there.
    return any(isinstance(one, (GeneratorType, map, filter, zip, type(iter([])))) for one in given)


def drawn_by(trainer: Trainer) -> Draw | None:
    """A call of the script's `get_batch_samples`; None if it has none."""
    if not replaced(trainer, "get_batch_samples", "_get_num_items_in_batch"):
        return None
    # Older overrides take no device.
    device = [trainer.args.device] if accepts(trainer.get_batch_samples, None, 0, None) else []

    def draw(batches: list[Any], add: Callable[[Tensor], Tensor]) -> Any:
        with _inheriting(trainer, _get_num_items_in_batch=add):
            return trainer.get_batch_samples(iter(batches), len(batches), *device)

    return draw


def loss_hooks(trainer: Trainer, owner: type[Trainer]) -> LossHooks:
    """The methods that compute and count a loss. `owner` is the class whose methods are the defaults."""
    prepare = trainer._prepare_inputs
    own_loss = trainer.compute_loss_func is not None or overrides(trainer, owner, "compute_loss")
    if own_loss and overrides(trainer, owner, "_prepare_inputs"):
        # The script's may sample, or count its calls: it prepares the batches of steps alone. Measuring the model's
        # own loss needs what it makes of a batch, too.
        prepare = partial(owner._prepare_inputs, trainer)
    return LossHooks(
        compute_loss=trainer.compute_loss,
        training_step=trainer.training_step,
        count_targets=trainer.count_targets,
        prepare_inputs=prepare,
        autocast=trainer.autocast_smart_context_manager,
        args=trainer.args,
        draw=drawn_by(trainer),
    )


def loss_settings(trainer: Trainer, owner: type) -> LossSettings:
    """The settings of a loss. `owner` is the class whose methods are the defaults."""
    return LossSettings(
        model=trainer.model,
        own_items=bool(overrides(trainer, owner, "_prepare_input")),
        function=trainer.compute_loss_func,
        default_loss=not overrides(trainer, owner, "compute_loss"),
        default_step=not overrides(trainer, owner, "training_step"),
        default_count=not overrides(trainer, owner, "count_targets"),
        smoothing=smoothing_of(trainer.args.label_smoothing_factor, trainer.model),
        lean=trainer.args.lean_loss,
        compiled=bool(trainer.args.torch_compile) or hasattr(trainer.model, "_orig_mod"),
        declared=trainer.loss_is_scaled_for_ga,
        exchanges=loss_exchanges(trainer),
    )


def loss_exchanges(trainer: Trainer) -> bool:
    """Return True if the script's loss, its step of evaluations or its model exchanges values with other processes."""
    if trainer.accelerator.num_processes == 1:
        return False
    given = [trainer.compute_loss_func] if trainer.compute_loss_func is not None else []
    return exchanges([trainer.compute_loss, trainer.prediction_step, trainer.model, *given])


def saved_by(trainer: Trainer, owner: type, beside: WrittenBeside) -> SavedByScript:
    """What the script of this Trainer takes part in. `owner` is the class whose methods are the defaults."""

    def write_model(folder: Path, gathered: Mapping[str, Any] | None) -> None:
        # Overrides written without sharding in mind take only the folder.
        if gathered is None:
            trainer._save(str(folder))
        else:
            trainer._save(str(folder), state_dict=gathered)

    def save_model(folder: Path) -> None:
        internal = {"_internal_call": True}
        takes = accepts(trainer.save_model, str(folder), **internal)
        trainer.save_model(str(folder), **(internal if takes else {}))

    def committed(folder: Path) -> None:
        trainer._checkpoint_committed()
        for name in () if trainer.args.save_only_model else sorted(own.intersection(SAVED_PARTS)):
            with _inheriting(trainer, **{name: lambda: None}):  # the checkpoint has that part
                getattr(trainer, name)(str(folder))

    own = overrides(trainer, owner, "_save_checkpoint", "_save", "save_model", *SAVED_PARTS)
    return SavedByScript(
        beside,
        write_model if "_save" in own else None,
        save_model if "save_model" in own else None,
        may_wait=not own and not trainer.callback_handler.listens_outside("on_save"),
        committed=committed,
    )


class TrainHooks:
    """The methods of a Trainer that a run calls, for one call of `train()`. What a script overrides, or assigns
    meanwhile, is called. Nothing keeps them longer than that.

    Args:
        owner: the class whose methods are the defaults.
        ignore_keys: keys of the model's output that are not predictions.
        evaluations: how evaluations run.

    Attributes:
        model: the bare model.
        loss: the methods that compute and count its loss.
        training_step: `training_step` on one micro-batch, with the target count that it gets or None.
        overridden: the replaced methods that change the plan.
        uncalled: what a script overrides and no run calls, with what to do instead.
        absent: methods of other trainers that a script's way to save calls, and that this one does not have.
        flops: the script's own `floating_point_ops`; None if that is the default.
        has_evaluation_data, evaluates_iterator: see the functions of these names.
        rehearses: evaluation is Windlass's own, so that `rehearse` finds the names of its metrics.
        saves_own_way: a script's `_save` or `_save_checkpoint` takes part in saving.
    """

    def __init__(
        self,
        trainer: Trainer,
        owner: type[Trainer],
        ignore_keys: list[str] | None,
        evaluator: Evaluator,
        evaluations: EvaluationPlan,
    ) -> None:
        self._trainer, self._ignore_keys = trainer, ignore_keys
        self._evaluator, self._evaluations = evaluator, evaluations
        self.model, self.loss = trainer.model, loss_hooks(trainer, owner)
        self.training_step: TrainingStep = trainer.run_micro_step
        self.overridden = replaced(trainer, *WATCHED)
        self.uncalled = uncalled_of(trainer, owner)
        self.absent = absent_in_save(trainer, owner)
        own_flops = overrides(trainer, owner, "floating_point_ops")
        self.flops: Callable[[Any], float] | None = trainer.floating_point_ops if own_flops else None
        self.has_evaluation_data = has_evaluation_data(trainer)
        self.evaluates_iterator = evaluates_iterator(trainer)
        self.rehearses = not overrides(trainer, owner, "evaluate", "_evaluate", "evaluation_loop")
        self.saves_own_way = bool(overrides(trainer, owner, "_save_checkpoint", "_save"))
        # Older overrides take `(model, trial, metrics)`, and no time at which training began.
        save = trainer._save_checkpoint
        self._trial = (None,) * max(required_by_position(save) - 1, int(accepts(save, None, None)))
        self._log_takes_start = accepts(trainer.log, {}, 0.0)
        self._log_names_start = accepts(trainer.log, {}, start_time=0.0)

    def wrap_model(self) -> None:
        wrap_model(self._trainer, training=True)

    def get_train_dataloader(self) -> Any:
        return self._trainer.get_train_dataloader()

    def data_facts(self) -> Mapping[str, Any]:
        return self._trainer.data_facts()

    def data_samples(self, batch: Any) -> list[dict[str, Any]]:
        return self._trainer.data_samples(batch)

    def create_optimizer(self, steps: int) -> tuple[torch.optim.Optimizer | None, Any]:
        """Return optimizer and scheduler for this number of updates."""
        self._trainer.create_optimizer_and_scheduler(num_training_steps=steps)
        return self._trainer.optimizer, self._trainer.lr_scheduler

    def reported_figures(self) -> dict[str, float]:
        """What a report of the run has beside its losses. Collective."""
        return self._trainer.reported_figures()

    def log(self, logs: dict[str, Any], started: Moment | None) -> None:
        """Report `logs` of a training that began at `started`."""
        if self._log_takes_start and started is not None:
            self._trainer.log(logs, started)
        elif self._log_names_start and started is not None:  # takes keywords alone
            self._trainer.log(logs, start_time=started)
        else:
            self._trainer.log(logs)

    @property
    def has_own_work(self) -> bool:
        """The script's own `_maybe_log_save_evaluate` is called for the work between updates."""
        return BETWEEN in self.overridden

    @property
    def works_around(self) -> bool:
        """It calls the inherited one, which does the work."""
        return calls_inherited(self._trainer._maybe_log_save_evaluate)

    @property
    def clips(self) -> str | None:
        """The name of the script's own way to clip; None if it has none."""
        if CLIP in self.overridden:
            return CLIP
        of_accelerator = replaced(self._trainer.accelerator, CLIP_OF_ACCELERATOR)
        return f"accelerator.{CLIP_OF_ACCELERATOR}" if of_accelerator else None

    def clip(self, inherited: Callable[[], Tensor]) -> None:
        """Clip the gradients of an update by the script's own way, in which Windlass's is `inherited`."""
        with _inheriting(self._trainer, **{CLIP: inherited}):
            self._trainer._clip_grad_norm(self._trainer.model_wrapped)

    def called_by_copy(
        self,
        evaluated: Callable[[dict[str, float]], None],
        saving: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> contextlib.AbstractContextManager[None]:
        """Within the body, `_evaluate` calls `evaluated` with its metrics, and `_save_checkpoint` saves in `saving`."""
        return _inheriting(self._trainer, _evaluate=evaluated, _save_checkpoint=saving)

    def work_between_updates(
        self,
        work: Callable[[], None] | None,
        losses: Tensor,
        norm: Tensor | None,
        rate: float,
        started: Moment,
    ) -> None:
        """Call the script's `_maybe_log_save_evaluate`, as transformers calls it; the inherited one does `work`. None:
        it is not called.
        """
        trainer, epoch = self._trainer, max(math.ceil(self._trainer.state.epoch or 0.0) - 1, 0)
        with _inheriting(trainer, **({} if work is None else {BETWEEN: work})):
            trainer._maybe_log_save_evaluate(
                losses,
                norm,
                trainer.model_wrapped,
                None,
                epoch,
                self._ignore_keys,
                started,
                learning_rate=rate,
            )

    @contextlib.contextmanager
    def noting_loss(self, note: Callable[[Any], None]) -> Iterator[None]:
        """Within the body, call `note` with each value that `compute_loss` returns."""
        compute_loss = self._trainer.compute_loss

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = compute_loss(*args, **kwargs)
            note(result)
            return result

        with attributes_of(self._trainer, compute_loss=noted):
            yield

    # --- evaluations ------------------------------------------------------------------------------------------------

    def evaluate(self, starting: bool) -> dict[str, float]:
        """The metrics of an evaluation within the run; `starting`: before its first update."""
        return self._trainer._evaluate(
            None, self._ignore_keys, **({"skip_scheduler": True} if starting else {})
        )

    def judge(self, metrics: dict[str, float]) -> bool:
        """Record the metrics of an evaluation; return True if it is the best so far."""
        return self._trainer._determine_best_metric(metrics, None)

    def rehearse(self, wanted: str, strategy: Strategy) -> dict[str, float]:
        """The metrics of the first batch of each evaluation set, for their names; see `Evaluator.rehearse`."""
        trainer, sets = self._trainer, self._trainer.eval_dataset
        loss_only = True if trainer.compute_metrics is None else None
        metrics: dict[str, float] = {}
        for name in sets if isinstance(sets, Mapping) else [None]:
            prefix = "eval" if name is None else f"eval_{name}"
            one = evaluation_of(
                trainer, self._evaluations, strategy, None, prefix=prefix, loss_only=loss_only
            )
            loader = trainer.get_eval_dataloader(name)
            metrics.update(self._evaluator.rehearse(loader, one, self.loss, wanted))
        return metrics

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        self._trainer._save_checkpoint(self._trainer.model, *self._trial)

    def learning_rate(self) -> float:
        """The learning rate of the update that begins, as the script reports it."""
        return self._trainer._get_learning_rate()

    def load_weights(self, folder: str) -> None:
        self._trainer._load_from_checkpoint(folder)

    @contextlib.contextmanager
    def restoring_generators(self, folder: str, generators: Generators) -> Iterator[None]:
        """Let the script's `_load_rng_state`, if it has one, decide if generators stay as the body restores them. A
        copy of another library's finds no file of that one, and begins with what the body restored.
        """
        if "_load_rng_state" not in self.overridden:
            yield
            return
        before = generators.state_dict()
        yield
        restored = generators.state_dict()
        if calls_inherited(self._trainer._load_rng_state):
            generators.load_state_dict(before)
        restore = partial(generators.load_state_dict, restored)
        with _inheriting(self._trainer, _load_rng_state=restore):
            self._trainer._load_rng_state(folder)

    def load_training_state(self, folder: str | None) -> None:
        self._trainer._load_optimizer_and_scheduler(folder)

    def load_best_model(self) -> None:
        self._trainer._load_best_model()


def every_forward_meets(strategy: Strategy) -> bool:
    """Return True if a forward of one rank waits for those of others, in evaluations too."""
    return strategy.sharded or has_divided_sequences(strategy.module)


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
        in_step=every_forward_meets(strategy) or trainer.accelerator.forwards_meet or loss_exchanges(trainer),
        compute_metrics=None if keeps_nothing else metrics,
        preprocess_logits=trainer.preprocess_logits_for_metrics,
        prefix=prefix,
        loss_only=keeps_nothing,
        predicting=predicting,
    )
