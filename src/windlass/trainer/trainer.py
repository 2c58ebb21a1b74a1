"""The Trainer: the names and signatures that scripts know, over an engine that knows none of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.engine import TrainerEngine
from windlass.assemble.batch import UpdateSize, update_size
from windlass.assemble.build import build
from windlass.assemble.facts import Facts, Progress
from windlass.assemble.resolve import NEVER_CALLED, resolve, resolve_parallel, resolve_precision
from windlass.callbacks.flow import DefaultFlowCallback
from windlass.callbacks.handler import CallbackHandler
from windlass.callbacks.metrics_log import MetricsLogCallback
from windlass.callbacks.printer import PrinterCallback
from windlass.callbacks.progress import ProgressCallback
from windlass.callbacks.tracking import TrackingCallback
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import RunPlan
from windlass.core.clock import Moment
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.logs import get_job_logger, get_logger, set_verbosity
from windlass.core.rng import enable_full_determinism, set_seed
from windlass.core.types import TrainOutput
from windlass.core.world import world_from_environment
from windlass.data.loader import Loader
from windlass.dist.gang import join
from windlass.engine.normalise import Normaliser
from windlass.metrics.speed import speed_metrics
from windlass.metrics.tokens import TargetCounter
from windlass.precision.autocast import autocast_context
from windlass.precision.check import check_precision
from windlass.trainer import save_retry
from windlass.trainer.base import overrides
from windlass.trainer.defaults import (
    agree_on_output,
    align_special_tokens,
    check_disks,
    checked_arguments,
    checked_collator,
    is_placed,
    multiplied_parameters,
    one_of,
    remote_problems,
)
from windlass.trainer.inputs import labels_in_signature, returns_loss_by_default
from windlass.trainer.interrupt import stopping_on_interrupt
from windlass.trainer.leaving import WaitBrokenOff
from windlass.trainer.parts import TrainerParts
from windlass.trainer.resuming import saved_position, saved_update_size
from windlass.trainer.run import TrainingRun, announce
from windlass.trainer.whereabouts import telling_where
from windlass.trainer.wrappers import accepts_count
from windlass.transforms.alone import Alone

logger = get_logger(__name__)

# What a subclass may replace, as far as the engine must know of it.
_OVERRIDABLE = (
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_train_sampler", "_get_eval_sampler",
    "evaluate", "evaluation_loop", *NEVER_CALLED,
)  # fmt: skip


class Trainer(TrainerParts):
    """Trains, evaluates and predicts with a PyTorch model.

    Args:
        model: any `nn.Module` whose forward returns a loss (first of a tuple, `loss` of a mapping or object), or
            whose loss `compute_loss_func` or an overridden `compute_loss` computes. Models of transformers do.
        args: the configuration; defaults to `TrainingArguments()`.
        data_collator: list of samples -> batch. By default padding with the tokenizer, or stacking.
        train_dataset, eval_dataset: map-style or iterable datasets, lists of dicts, Hugging Face datasets;
            evaluation data may be a dict of named sets.
        processing_class: tokenizer or processor, saved with the model. `tokenizer=` is its earlier name.
        model_init: makes the model anew at each `train()`, after seeding; instead of `model`.
        compute_loss_func: `(outputs, labels, num_items_in_batch=None) -> loss`.
        compute_metrics: `EvalPrediction -> dict`.
        callbacks: classes or instances; `callback=` is accepted too.
        optimizers: an optimizer and a scheduler to use as they are.
        optimizer_cls_and_kwargs: a class and keywords to build the optimizer from, instead of `args.optim`.
        preprocess_logits_for_metrics: `(logits, labels) -> logits`, before they are kept for metrics.

    Raises:
        ConfigError, ModelError: what can be known to be wrong before training.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        callback: list[Any] | None = None,
    ) -> None:
        self.args = checked_arguments(args)
        self._seed()
        self._meet_the_world()
        self.model_init = model_init
        self.place_model_on_device = getattr(self.args, "place_model_on_device", None) is not False
        self._take_model(self._first_model(model))
        self.data_collator = checked_collator(data_collator, processing_class or tokenizer)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = one_of("processing_class", processing_class, "tokenizer", tokenizer)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._user_optimizer = self.optimizer is not None
        self._created_lr_scheduler = False
        self._overridden = overrides(self, Trainer, _OVERRIDABLE)
        self._validate_arguments()
        self._inspect_hooks()
        self._start_callbacks(one_of("callbacks", callbacks, "callback", callback) or [])

    # --- construction -----------------------------------------------------------------------------------------------

    def _seed(self) -> None:
        if self.args.full_determinism:
            enable_full_determinism(self.args.seed)
        else:
            set_seed(self.args.seed)

    def _meet_the_world(self) -> None:
        args = self.args
        self._world = world_from_environment()
        set_verbosity(args.get_process_log_level())
        self._device = args.device
        if self._device.type not in ("cpu", "mps"):
            torch.accelerator.set_device_index(self._device.index or 0)
        self._gang = join(self._world, self._device, args.ddp_timeout, args.ddp_backend)
        self.create_accelerator_and_postprocess()

    def create_accelerator_and_postprocess(self) -> None:
        """Make `self.accelerator`: device, ranks and precision of this run."""
        precision = resolve_precision(self.args)
        check_precision(precision, self._device)
        self._autocast = autocast_context(precision, self._device)
        self._loop_engine = TrainerEngine(
            lambda: (self.model, self.model_wrapped, self.optimizer, self.lr_scheduler),
            lambda: resolve_parallel(self.args, self._world).dist,
        )
        self.accelerator = Accelerator.of_run(
            self._gang,
            self._device,
            precision,
            self.args.gradient_accumulation_steps,
            self._loop_engine,
        )

    def _first_model(self, model: nn.Module | None) -> nn.Module:
        if (model is None) == (self.model_init is None):
            fix = "give exactly one of `model` and `model_init`"
            raise ConfigError(Problem("model", None if model is None else type(model).__name__, fix))
        return self.call_model_init() if model is None else model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model from `model_init`, which may take the trial of a search or nothing."""
        assert self.model_init is not None
        takes_trial = any(
            p.name == "trial"
            or (p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
            for p in inspect.signature(self.model_init).parameters.values()
        )
        model = self.model_init(trial) if takes_trial else self.model_init()
        if model is None:
            raise ModelError("model_init returned None; it must return the model")
        return model

    def _take_model(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                Problem(
                    "model",
                    type(model).__name__,
                    "give an nn.Module; load a name first, as with AutoModelForCausalLM.from_pretrained(name)",
                )
            )
        if self.place_model_on_device and not is_placed(model):
            model.to(self._device)
        self.model = self.model_wrapped = model
        self._strategy = Alone(model)
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", None) is not None and not self.args.use_cache:
            config.use_cache = False
        named = self.args.label_names
        self.label_names = labels_in_signature(model) if named is None else list(named)
        self.can_return_loss = returns_loss_by_default(model)
        self._parameter_count = multiplied_parameters(model)
        self._model_divides = accepts_count(model)
        self._counter = TargetCounter(tuple(self.label_names))
        self._normaliser = Normaliser(self._gang.size, sum_on_device=self._gang.sum_on_device)
        self._loss_probed = False
        self._signature_columns = None

    def _validate_arguments(self) -> None:
        problems = remote_problems(str(self.args.output_dir))
        if self._user_optimizer and self.optimizer_cls_and_kwargs is not None:
            problems.append(Problem("optimizers", "given", "leave out either it or optimizer_cls_and_kwargs"))
        if self.model_init is not None and (self._user_optimizer or self.lr_scheduler is not None):
            fix = "model_init makes a new model at each train(), unknown to this optimizer; override create_optimizer"
            problems.append(Problem("optimizers", "given", fix))
        if problems:
            raise ConfigError(problems)

    def _start_callbacks(self, callbacks: list[Any]) -> None:
        plain = self.args.disable_tqdm
        defaults = [DefaultFlowCallback, MetricsLogCallback(self.output_folder)]
        if self.args.report_to:
            callbacks = [TrackingCallback(self.args.report_to), *callbacks]
        self.callback_handler = CallbackHandler(
            [*defaults, *callbacks], self.model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        self.add_callback(PrinterCallback if plain else ProgressCallback)
        self.control = TrainerControl()
        self.state = self._new_state()
        self.is_in_train = False
        self.control = self.callback_handler.fire("on_init_end", self.args, self.state, self.control)

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
        )

    # --- callbacks --------------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback, by class or instance."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take a callback out, by class or instance, and return it; None where it is not there."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Take a callback out, by class or instance."""
        self.callback_handler.remove_callback(callback)

    # --- training ---------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        *,
        model_path: str | None = None,
    ) -> TrainOutput:
        """Train, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: True continues from the newest verified checkpoint of `args.output_dir`, "auto"
                does so or starts afresh where there is none; a path continues from exactly that one. Afterwards the
                run has the same bits as one that was never interrupted.
            ignore_keys_for_eval: keys of the model's output that are no predictions, in evaluations along the way.
            model_path: the earlier name of `resume_from_checkpoint`.

        Raises:
            ConfigError: with every problem of the configuration, before any work.
            CheckpointError: the checkpoint is missing, damaged, or of another model; or the last save failed.
            NonFiniteError: loss or gradient became NaN or infinite (`nonfinite_policy="raise"`).
            Preempted: a scheduler asked the job to leave (`preemption_signals`); the process ends with code 75.
        """
        resume = one_of("resume_from_checkpoint", resume_from_checkpoint, "model_path", model_path)
        if resume is None:
            resume = self.args.resume_from_checkpoint
        self._ignore_keys_for_eval = ignore_keys_for_eval
        if self.model_init is not None:
            self._seed()
            self._take_model(self.call_model_init(trial))
            self.optimizer, self.lr_scheduler = None, None
        started = Moment()
        self._watch_memory()
        self._check_call_alike("train()", resume)  # before anything else that all ranks do together
        self._hold_folder()
        self.is_in_train, self._interrupted, self._wants_stop = True, False, False
        self._resumes_within_epoch = False
        try:
            self._leave_saving()  # of a run that an interrupt ended at once: its thread writes to the same folder
            with self._taking_signals():
                checkpoint = self._resume_point(resume)
                plan = self._prepare_run(checkpoint)
                with stopping_on_interrupt(self._stop_and_save), self._telling_where():
                    self._run_training()
                output = self._finish_training(plan, started)
                self._end_run()
            return output
        except (Exception, SystemExit):
            self._leave_saving()
            raise
        finally:
            self._release_folder()
            self.is_in_train = False
            self._loop_engine.detach()
            self.model_wrapped = self.model
            if self._executor is not None:
                self._executor.release()
                self._executor = None
            self._close_displays()

    def _telling_where(self) -> AbstractContextManager[None]:
        return telling_where(self._world, lambda: self.state.global_step)

    def _prepare_run(self, checkpoint: Any) -> RunPlan:
        """Resolve the plan and build model, optimizer, executor and loop; then load. Nothing is trained yet."""
        agree_on_output(self._gang, self.args.output_path, resuming=checkpoint is not None)
        self.state, self.control = self._new_state(), TrainerControl()
        self._loss_probed = False
        self._newest_checkpoint, self._rollbacks = None, 0
        self._best_evaluations, self._best_standing = [], []
        self._last_metric, self._best_saved, self._saves_ephemeral = (-1, None), (None, None), False
        self._read_memory_note()
        loader = self.get_train_dataloader()
        source = self._group_source(loader, saved_position(checkpoint))
        self._source_samples = getattr(source, "num_samples", None)
        saved_size = None if checkpoint is None else saved_update_size(checkpoint)
        self._update_size, note = update_size(self.args, self._gang.size, saved_size, self._fits)
        if self._update_size.asked_micro is not None and isinstance(source, Loader):
            source.resize(self._update_size.micro, self._update_size.accumulation)
        per_epoch = source.groups_per_epoch(self._update_size.accumulation)
        resumed = self._resumed_progress(checkpoint, source)
        plan = resolve(self.args, self._facts(per_epoch, resumed, saved_size))
        self._check_plan_alike(plan)
        if note is not None:
            get_job_logger(__name__).warning(note)
        self.accelerator.gradient_accumulation_steps = plan.batch.accumulation
        self._fill_state(plan)
        self._build(plan, source)
        if checkpoint is not None:
            self._load_from_checkpoint(str(checkpoint.folder))
            self._restore_run(checkpoint)
        self._initial_tokens_seen = self.state.num_input_tokens_seen
        self._show_parts(loader)
        announce(self, plan)
        self._check_metric(plan)
        return plan

    def _facts(
        self,
        groups_per_epoch: int | None,
        resumed: Progress | None = None,
        saved_size: UpdateSize | None = None,
    ) -> Facts:
        return Facts(
            self._world,
            groups_per_epoch,
            has_training_data=True,
            has_evaluation_data=self._has_evaluation_data,
            overridden=self._overridden,
            resumed=resumed,
            saved_size=saved_size,
            fits=self._fits,
        )

    def _fill_state(self, plan: RunPlan) -> None:
        state = self.state
        state.max_steps, state.num_train_epochs = plan.duration.steps, plan.duration.epochs
        state.logging_steps, state.eval_steps = plan.logging.steps, plan.evaluation.steps
        state.save_steps, state.train_batch_size = plan.save.cadence.steps, plan.batch.micro

    def _adopt_update_size(self, size: UpdateSize) -> None:
        """Updates have other micro-batches from here on, and as many samples."""
        self._update_size = size
        self.state.train_batch_size = size.micro
        self.accelerator.gradient_accumulation_steps = size.accumulation

    def _build(self, plan: RunPlan, source: Any) -> None:
        align_special_tokens(self.model, self.processing_class)
        built = build(
            self.model, self._created_optimizer_and_scheduler, plan, self._device, self._gang, self.optimizer
        )
        self._check_optimizer_alike()
        self.model_wrapped = built.executor.model
        self._executor, self._strategy = built.executor, built.executor.strategy
        check_disks(self._output_disks(), self._strategy, self.args.save_on_each_node)
        self._check_saved_model(plan.save)
        self._run = TrainingRun(self, plan, built, source)
        self._loop_engine.attach(self._run.backward, self._strategy)

    def _created_optimizer_and_scheduler(self, num_training_steps: int) -> tuple[Any, Any]:
        if self._created_lr_scheduler:
            # It was made for the length of an earlier run.
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer_and_scheduler(num_training_steps=num_training_steps)
        return self.optimizer, self.lr_scheduler

    def _show_parts(self, loader: Any) -> None:
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader, handler.processing_class = loader, self.processing_class

    def _run_training(self) -> None:
        self.control = self.callback_handler.fire("on_train_begin", self.args, self.state, self.control)
        if self.args.eval_on_start and self.state.global_step == 0:
            # No update led to it, so a schedule that follows the metric has nothing to learn from it.
            self.evaluate(ignore_keys=self._ignore_keys_for_eval)
        if self._interrupted:
            self.control.should_training_stop = True  # which the first event of a run clears
        self._run.training_began()
        if self._is_told():
            self._leave()  # nothing is left to be saved
        self._run.make_up()
        try:
            self._run.loop.run()
        except WaitBrokenOff:
            self._run.leave_here()
        if self._interrupted:
            self._save_checkpoint(self.model)  # before the first update: the loop had no occasion
        if self._is_told():
            self._run.leave_here()
        self._finish_last_save(save_retry.LAST_PAUSES)

    def _close_displays(self) -> None:
        """Give the terminal back: a run that an exception ended has no `on_train_end` that would."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback):
                callback.close()

    def _stop_and_save(self) -> None:
        get_job_logger(__name__).warning(
            "interrupted: finishing this update, then saving; train(resume_from_checkpoint=True) goes on from there. "
            "Press Ctrl-C again to stop at once"
        )
        if self._gang.size > 1:
            # The others must end with the same update: they learn of it with a coming one.
            self._wants_stop = True
        else:
            self._stop_here()

    def _finish_training(self, plan: RunPlan, started: float) -> TrainOutput:
        run, state = self._run, self.state
        run.finish()
        run.saver.release()
        metrics: dict[str, float] = speed_metrics(
            "train",
            started,
            num_samples=run.samples_done,
            num_steps=run.updates_done,
        )
        metrics["total_flos"] = state.total_flos
        metrics["train_loss"] = run.ledger.mean_loss()
        metrics.update(self._memory_metrics("train"))
        self.log(metrics)
        if plan.save.load_best_at_end:
            self._load_best_model()
        self.control = self.callback_handler.fire("on_train_end", self.args, state, self.control)
        self._finish_saving()  # of a callback that saved there
        self._upload_files()
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)

    def set_initial_training_values(
        self, args: Any, dataloader: Any
    ) -> tuple[int, int, int, float, int, int, int]:
        """What a run over this loader comes to, for scripts that ask.

        Returns:
            (epochs, updates per epoch, samples of one epoch, samples of the run, samples of one update,
            micro-batches per epoch, updates of the run)
        """
        accumulation = update_size(args, self._gang.size)[0].accumulation
        per_epoch = self._group_source(dataloader).groups_per_epoch(accumulation)
        duration = resolve(args, self._facts(per_epoch)).duration
        update, steps = self.get_total_train_batch_size(args), duration.steps
        if per_epoch is None:
            batches = steps * accumulation
            return duration.epochs, steps, update * steps, update * steps, update, batches, steps
        examples = self.num_examples(dataloader)
        seen = update * steps if args.max_steps > 0 else examples * args.num_train_epochs
        return duration.epochs, per_epoch, examples, seen, update, len(dataloader), steps

    def end(self) -> None:
        """Close the process group: the last call of a script, after everything that needs the other processes."""
        self.accelerator.end_training()
