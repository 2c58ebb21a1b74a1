"""The Trainer: a facade with the names and signatures that scripts know."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from windlass.config.arguments import TrainingArguments
from windlass.core.attributes import keep_properties
from windlass.core.errors import ConfigError, DataError, ModelError, Problem
from windlass.core.locations import local_folder
from windlass.core.logs import set_trainer_verbosity
from windlass.core.run_clock import EVALUATION, Moment, run_clock
from windlass.core.tensors import count_elements
from windlass.core.trees import detach
from windlass.core.types import EvalLoopOutput, PredictionOutput, TrainOutput
from windlass.core.watched_numbers import micro_batch_count
from windlass.core.world import world_from_environment
from windlass.trainer.lazy_modules import (
    batch_rows,
    card,
    columns,
    defaults,
    evaluation,
    evaluator,
    handler,
    hooks,
    instead,
    interruption,
    loading,
    memory_stages,
    model_writer,
    optimization,
    overview,
    plans,
    preparation,
    publishing,
    reports,
    run_folder,
    run_training,
    services,
    session,
)
from windlass.trainer.losses import (
    LabelSmoother,
    as_count,
    call_model,
    check_differentiable,
    empty_batch,
    on_device,
    without_gradient,
)
from windlass.trainer.uncalled import SAVED
from windlass.trainer.wrappers import innermost, labels_in_signature, returns_loss_by_default

if TYPE_CHECKING:
    from windlass.accelerator.accelerator import Accelerator
    from windlass.callbacks.handler import CallbackHandler
    from windlass.config.plan import CallPlan
    from windlass.core.events import TrainerControl, TrainerState
    from windlass.search.default_spaces import BestRun, HPSearchBackend
    from windlass.search.search import ChosenTrial, TrialWatch
    from windlass.trainer.instead import RunRequest
    from windlass.trainer.interruption import Interruption
    from windlass.trainer.memory_stages import TrainerMemoryTracker
    from windlass.trainer.model_writer import ModelWriter, WrittenBeside
    from windlass.trainer.plans import Plans
    from windlass.trainer.run import Run
    from windlass.trainer.run_folder import RunFolder
    from windlass.transforms.strategy import Strategy


class Trainer:
    """Trains, evaluates and predicts with a PyTorch model.

    Args:
        model: any `nn.Module` whose forward returns a loss (first of a tuple, `loss` of a mapping or object), or
            whose loss `compute_loss_func` or an overridden `compute_loss` computes. Models of transformers do.
        args: the configuration; defaults to `TrainingArguments()`.
        data_collator: list of samples -> batch. By default padding with the tokenizer, or stacking.
        train_dataset: a map-style or iterable dataset, a list of dicts, or a Hugging Face dataset.
        eval_dataset: the same, or a dict of named sets.
        processing_class: tokenizer or processor, saved with the model. `tokenizer=` is its earlier name.
        model_init: makes a new model at each `train()`, after seeding; instead of `model`.
        compute_loss_func: `(outputs, labels, num_items_in_batch=None) -> loss`.
        compute_metrics: `EvalPrediction -> dict`.
        callbacks: classes or instances; `callback=` is accepted too.
        optimizers: an optimizer and a scheduler to use.
        optimizer_cls_and_kwargs: a class and keywords to build the optimizer from, instead of `args.optim`.
        preprocess_logits_for_metrics: `(logits, labels) -> logits`, before they are kept for metrics.

    Scripts may assign all arguments as attributes; the next `train()`, `evaluate()` or `predict()` uses the new values.

    Attributes:
        model: the trained module.
        model_wrapped: the module that forwards run through: during `train()` the wrapper of its strategy, if any.
        accelerator: device, ranks and precision; prepares other models that a script trains beside this one.
        optimizer: that of the current or last `train()`; None before.
        lr_scheduler: that of the current or last `train()`; None before.
        label_names: keys of a batch that are labels.
        can_return_loss: the model's forward computes a loss by default.
        place_model_on_device: the model is moved to this process's device.
        is_in_train: `train()` is running.

    Raises:
        ConfigError, ModelError: whatever can be known to be wrong before training.
    """

    # True: `compute_loss` is divided by the count of the whole update and multiplied by the number of ranks. False: it
    # is a mean over its micro-batch, or divided by its count. None: that too, unless its code takes care of the ranks.
    loss_is_scaled_for_ga: bool | None = None
    # Engines that do not exist here; scripts check for them.
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False
    is_model_parallel = is_distributed_loading_by_transformers = False
    deepspeed = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Scripts declare attributes for type checkers, as `args = None`, which the constructor assigns.
        keep_properties(cls, Trainer)

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
        self.args = self._checked_arguments(args)
        defaults.seed_all(self.args)
        set_trainer_verbosity(self.args.get_process_log_level())
        self._session = session.Session.open(self.args)
        self._open_accelerator()
        self.model_init, self.is_in_train = model_init, False
        # Of a subclass of the arguments: in transformers it is a property that is made to be overridden.
        self.place_model_on_device = getattr(self.args, "place_model_on_device", None) is not False
        self.processing_class = defaults.one_of("processing_class", processing_class, "tokenizer", tokenizer)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        defaults.check_called(
            data_collator, self.compute_loss_func, compute_metrics, preprocess_logits_for_metrics, model_init
        )
        self.data_collator = data_collator or self._default_collator()
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = defaults.pair_of_optimizers(optimizers)
        self.optimizer_cls_and_kwargs, self._made_scheduler = optimizer_cls_and_kwargs, False
        self._run: Run | None = None
        self._folder: RunFolder | None = None
        self._take_model(defaults.first_model(model, None if model_init is None else self.call_model_init))
        makers = hooks.replaced(self, *defaults.MAKERS)
        zero = self._plan.dist.zero
        defaults.check_given(self.args, zero, optimizers, optimizer_cls_and_kwargs, model_init, makers)
        callbacks = defaults.listed_callbacks(callbacks, callback)
        callback_handler = handler.CallbackHandler(
            [*defaults.default_callbacks(self.args, self.output_folder), *callbacks],
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        self._services = services.Services.open(
            self._session, self._plans, self.accelerator, self._engine, callback_handler
        )
        self._services.loss.take_model(self.model, self.label_names)
        self._services.loss.adopt(hooks.loss_settings(self, Trainer), hooks.loss_hooks(self, Trainer))
        for last in defaults.last_callbacks(self.args):
            self.add_callback(last)
        self._session.memory.end("init")
        self._services.events.fire("on_init_end")

    def __deepcopy__(self, memo: object) -> NoReturn:
        # Its accelerator, its process group and its lock are this one's: the copy could not train.
        raise TypeError("a Trainer cannot be copied: make another one with a copy of the model")

    def __repr__(self) -> str:
        """Model, data, progress, device and folder in one line."""
        if "_services" not in self.__dict__:  # an error in the constructor, in a debugger
            return object.__repr__(self)
        return (
            f"{type(self).__name__}({', '.join(f'{name}: {fact}' for name, fact in self._facts().items())})"
        )

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return overview.html(type(self).__name__, self._facts())

    def _facts(self) -> dict[str, str]:
        return overview.facts(
            self.model,
            self.train_dataset,
            self.eval_dataset,
            self.state,
            device=self._session.device,
            output_dir=self.args.output_dir,
        )

    # --- construction -------------------------------------------------------------------------------------------------

    def _checked_arguments(self, args: TrainingArguments | None) -> TrainingArguments:
        """The arguments of the constructor, or the defaults. Raises ConfigError if they are of another type."""
        return defaults.checked_arguments(args)

    def _default_collator(self) -> Callable[[list[Any]], Any]:
        """The collator if none is given: it pads if the tokenizer can pad, and stacks otherwise."""
        return defaults.default_collator(self.processing_class)

    def _open_accelerator(self) -> None:
        self._engine, self._accelerator = services.open_accelerator(self._session, self._plans)
        try:
            self.create_accelerator_and_postprocess()
        # A copy of transformers' method reads what only its own classes have, of the trainer or what it holds.
        except AttributeError as error:
            if error.obj is not self and not type(error.obj).__module__.startswith("windlass."):
                raise
            what = f"{type(self).__name__}.create_accelerator_and_postprocess"
            raise ModelError(f"{what}: {error}; {defaults.OWN_ACCELERATOR}") from error

    def create_accelerator_and_postprocess(self) -> None:
        """Called once `self.accelerator` is made, for a subclass that adds to it; does nothing."""

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model from `model_init`, which gets `trial`, that of a search or None, if it takes an argument."""
        assert self.model_init is not None
        model = self.model_init(trial) if defaults.takes_trial(self.model_init) else self.model_init()
        if model is None:
            raise ModelError("model_init returned None; it must return the model")
        return model

    def _take_model(self, model: nn.Module) -> None:
        # No device need hold all layers of a pipeline.
        if self.place_model_on_device and self._session.all_ranks.mesh.pipeline == 1:
            self._move_model_to_device(model, self._session.device)
        defaults.apply_qat(model, self.args.qat)  # evaluations before training round as well
        self.model = self.model_wrapped = model
        self._engine.take_model(model)
        self._writer = self._new_writer(None)
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", None) is not None and not self.args.use_cache:
            config.use_cache = False
        named = self.args.label_names
        self.label_names = labels_in_signature(model) if named is None else list(named)
        self.can_return_loss = returns_loss_by_default(model)
        self._signature_columns: list[str] | None = None

    def _new_writer(self, strategy: Strategy | None) -> ModelWriter:
        return model_writer.ModelWriter(
            self.model,
            strategy or services.spread_untrained(self.model, self._engine, self._session, self.accelerator),
        )

    def _written_beside(self) -> WrittenBeside:
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        return model_writer.WrittenBeside(tokenizer, self.args.to_dict)

    @property
    def _plan(self) -> CallPlan:
        """The plan of the present call, or of the present arguments outside a call."""
        return self._plans.present

    @property
    def _model_writer(self) -> ModelWriter:
        if self._writer.model is not self.model:  # a script may assign another one
            self._writer = self._new_writer(None)
        return self._writer

    # --- what a run and its objects know ------------------------------------------------------------------------------

    @functools.cached_property
    def _plans(self) -> Plans:
        """Made at the first use: a subclass may assign `args` before it calls this class's constructor."""
        return plans.Plans(world_from_environment())

    @property
    def args(self) -> TrainingArguments:
        """The configuration."""
        return self._plans.args

    @args.setter
    def args(self, value: TrainingArguments) -> None:
        self._plans.args = value

    @property
    def state(self) -> TrainerState:
        """The progress of the run."""
        return self._services.events.state

    @state.setter
    def state(self, value: TrainerState) -> None:
        self._services.events.state = value

    @property
    def control(self) -> TrainerControl:
        """The control flags that callbacks set."""
        return self._services.events.control

    @control.setter
    def control(self, value: TrainerControl) -> None:
        self._services.events.control = value

    @property
    def callback_handler(self) -> CallbackHandler:
        """The callbacks. A script may assign a handler of its own, of a class derived from this one."""
        return self._services.events.handler

    @callback_handler.setter
    def callback_handler(self, value: CallbackHandler) -> None:
        self._services.events.handler = value

    def add_callback(self, callback: Any) -> None:
        """Append a callback: an instance, or a class that can be built without arguments.

        Raises:
            ConfigError: it has none of the event methods, or its class cannot be built without arguments.
        """
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any | None:
        """Remove `callback`, an instance, or the first of a class, and return it; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove `callback`, an instance, or the first of a class; a class that is absent is ignored.

        Raises:
            ValueError: an instance that is not among the callbacks.
        """
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        """Return True on the first process of each machine."""
        return self._session.world.is_local_main

    def is_world_process_zero(self) -> bool:
        """Return True on the first process of the job."""
        return self._session.world.is_main

    @property
    def accelerator(self) -> Accelerator:
        """Device, ranks and precision; prepares other models that a script trains beside this one."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, value: Any) -> None:
        # Scripts let go of it after training, or train by themselves without this constructor.
        if value is None or "_accelerator" not in self.__dict__:
            self._accelerator = value
            return
        raise ConfigError(Problem("trainer.accelerator", type(value).__name__, defaults.OWN_ACCELERATOR))

    @property
    def is_fsdp_enabled(self) -> bool:
        """True if the model's parameters are sharded."""
        return self._engine.dist.shard is not None

    @property
    def is_deepspeed_enabled(self) -> bool:
        """True if DeepSpeed's ZeRO divides the model among ranks."""
        return self._engine.dist.zero is not None

    @property
    def output_folder(self) -> Path:
        """The folder of this run's files on this machine: a staging folder if `output_dir` is a URL."""
        return local_folder(self.args.output_path)

    def _get_output_dir(self, trial: Any = None) -> str:
        """`output_folder` as text."""
        return str(self.output_folder)

    @property
    def hub_model_id(self) -> str | None:
        """The repository that the model is pushed to; None without `push_to_hub`."""
        return self.args.hub_model_id if self.args.push_to_hub else None

    @property
    def current_flos(self) -> float:
        """FLOPs of the run so far."""
        return self.state.total_flos

    @property
    def _train_batch_size(self) -> int:
        """Samples of a training loader's batch, as far as memory holds them."""
        return self.state.train_batch_size or self.args.train_batch_size

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """Micro-batches of the current update: fewer than asked for at the end of an epoch."""
        number = self.accelerator.gradient_state.micro_batches or self.args.gradient_accumulation_steps
        return micro_batch_count(number)

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, value: int) -> None:
        """Each update sets it again."""
        self.accelerator.gradient_state.micro_batches = value

    @property
    def compute_loss_func(self) -> Callable[..., Any] | None:
        """The script's `(outputs, labels, num_items_in_batch=None) -> loss`."""
        return self._compute_loss_func

    @compute_loss_func.setter
    def compute_loss_func(self, function: Any) -> None:
        if function is not None and not callable(function) and hooks.replaced(self, "compute_loss"):
            # Nothing calls it. Before there was the attribute, libraries have said so that `compute_loss` has scaled
            # its loss: transformers does not if there is a function.
            function, self.loss_is_scaled_for_ga = None, True
        self._compute_loss_func: Callable[..., Any] | None = function

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """True if the model's forward is given `num_items_in_batch`: by its signature, unless it refuses it."""
        return self._services.loss.gets_count

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        self._services.loss.declare_model(bool(value))

    @property
    def label_smoother(self) -> LabelSmoother | None:
        """The smoothed loss that takes the place of the model's own; None without `label_smoothing_factor`."""
        factor = self._services.loss.settings.smoothing
        return LabelSmoother(factor) if factor else None

    # --- training -----------------------------------------------------------------------------------------------------

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
            resume_from_checkpoint: True: continue from the newest verified checkpoint of `args.output_dir`; "auto": the
                same, or a new run if there is none; a path: from there. It ends with the bits of an uninterrupted run.
            trial: given to `model_init`, if that takes an argument; nothing else reads it.
            ignore_keys_for_eval: keys of the model's output that are not predictions, in evaluations of this run.
            model_path: the earlier name of `resume_from_checkpoint`.

        Raises:
            ConfigError: with every problem of the configuration, before any work.
            CheckpointError: the checkpoint is missing, damaged, or of another model; or the last save failed.
            NonFiniteError: loss or gradient became NaN or infinite (`nonfinite_policy="raise"`).
            Preempted: a scheduler requested the job to exit (`preemption_signals`); the process ends with code 75.
        """
        resume = defaults.one_of("resume_from_checkpoint", resume_from_checkpoint, "model_path", model_path)
        if resume is None:
            resume = self.args.resume_from_checkpoint
        if self.model_init is not None:
            defaults.seed_all(self.args)
            self._take_model(self.call_model_init(trial))
            self._services.loss.take_model(self.model, self.label_names)
            self.optimizer, self.lr_scheduler = None, None  # they update the parameters of the model before
        if self._made_scheduler:  # for the length of an earlier run
            self.lr_scheduler, self._made_scheduler = None, False
        loop = hooks.around(self, Trainer, "_inner_training_loop")
        # By name, as transformers calls it: overrides may take keywords alone.
        trained: TrainOutput = loop(
            batch_size=self.args.train_batch_size,
            args=self.args,
            resume_from_checkpoint=resume,
            trial=trial,
            ignore_keys_for_eval=ignore_keys_for_eval,
        )
        return trained

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Check the configuration, and train; `train` calls it. An override calls it with what it got, and may do
        something before and after.

        Args:
            batch_size, trial: not read: `args` and the model decide.
            args: the Trainer's.
            resume_from_checkpoint: as `train` got it, a path or True.
            ignore_keys_for_eval: as in `train`.
        """
        if args is not None and args is not self.args:
            fix = "a run has the arguments of its Trainer: change self.args, and pass that"
            raise ConfigError(Problem("_inner_training_loop", "other args", fix))
        # Before any other collective of this call.
        preparation.begin_call(self, Trainer, self._services, "train", "train()", resume_from_checkpoint)
        # The arguments are checked by now, and nothing of a run has begun: no folder is made for a forecast.
        instead.give_way(lambda: self._request(ignore_keys_for_eval))
        earlier, self._run = self._run, None
        self._folder = run_folder.RunFolder(self.args, self._session.all_ranks)
        self._folder.take()
        self.is_in_train, timed = True, run_clock().begin()
        signals = interruption.Interruption(self._session, self._plan.preemption)
        try:
            self._services.events.prepare_displays()
            if earlier is not None:  # after an interrupt its thread may still write to the same folder
                earlier.checkpoints.abandon()
            with signals.listening(lambda: self._run):
                return self._train(signals, resume_from_checkpoint, ignore_keys_for_eval)
        except BaseException as error:
            if self._run is not None:
                self._run.broke_off(error)
            raise
        finally:
            self.is_in_train, self.model_wrapped = False, self.model
            self._folder.release(None if self._run is None else self._run.checkpoints.saver)
            self._services.end_run()
            if self._run is not None:
                self._run.release()
            if timed:
                run_clock().end()

    def _request(self, ignore_keys: list[str] | None) -> RunRequest:
        """What a run is made of."""
        evaluations = self._plan.evaluations
        bound = hooks.TrainHooks(self, Trainer, ignore_keys, self._services.evaluator, evaluations)
        return instead.RunRequest(
            self.args, self._services, bound, self.optimizer, self.processing_class, self._new_writer
        )

    def _train(self, signals: Interruption, resume: Any, ignore_keys: list[str] | None) -> TrainOutput:
        assert self._folder is not None
        publishing.opened(self.callback_handler, self._services.session.all_ranks)
        request = self._request(ignore_keys)
        self._run, self._writer, checkpoint, place = preparation.prepare_run(
            request, signals, self._folder, resume
        )
        publishing.continued(self.callback_handler, checkpoint, self._services.session.all_ranks)
        self.model_wrapped = self._run.executor.model
        pad_token = getattr(request.tokenizer, "pad_token_id", None)
        return run_training.RunTraining(self._run, request.hooks, pad_token).execute(checkpoint, place)

    def run_micro_step(self, batch: Any, count: Tensor | None) -> Any:
        """Call `training_step` for one micro-batch of a run, without `count` if an override does not take it, and
        return its result.

        Args:
            batch: the collated batch, in host memory.
            count: what `training_step` gets as `num_items_in_batch`.
        """
        if self._services.loss.step_takes_count:
            return self.training_step(self.model_wrapped, batch, num_items_in_batch=count)
        return self.training_step(self.model_wrapped, batch)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of one micro-batch.

        Args:
            model: what to run the forward through; under data parallelism the wrapper.
            inputs: the collated batch, in host memory.
            num_items_in_batch: the target count of this micro-batch, or of the whole update (see docs/losses.md).

        Returns:
            Scalar tensor without gradient: the loss that `compute_loss` returned.
        """
        if not model.training:
            model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            if self._services.loss.takes_count:
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            else:
                loss = self.compute_loss(model, inputs)
        total = check_differentiable(loss)
        self._accelerator.backward(loss)
        return total.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of one batch: a scalar tensor, or `LossTerms`. Override it for a loss of your own.

        An override returns a mean over this batch, or a sum divided by `num_items_in_batch`, which is this batch's
        target count; Windlass weights it by this batch's share of the update.

        Args:
            model: what to run the forward through; in training the wrapper of the strategy, if any.
            inputs: the batch on this process's device, with its labels. A new container, which may be changed.
            return_outputs: return `(loss, outputs)`, with the model's outputs, as evaluations need them.
            num_items_in_batch: the target count that the loss is divided by (see docs/losses.md); None: the loss is a
                mean over this batch.

        Raises:
            ModelError: the model returned no loss.
        """
        policy = self._services.loss
        loss, outputs = policy.default_loss(
            model, inputs, num_items_in_batch, self._compute_loss_func, return_outputs
        )
        return (loss, outputs) if return_outputs else loss

    def count_targets(self, batch: Any) -> float:
        """Number of targets that the loss of `batch`, in host memory, is a mean over; called before its forward.

        Override it if labels do not show the number (see docs/losses.md).
        """
        return self._services.loss.counter(batch)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch on this process's device, as a new container: hooks may take labels out of it."""
        own = self._prepare_input if self._services.loss.settings.own_items else None
        prepared = on_device(inputs, self._session.device, None) if own is None else own(inputs)
        if isinstance(prepared, Mapping | list | tuple) and not prepared:
            raise empty_batch(self._signature_columns)
        return prepared

    def _prepare_input(self, data: Any) -> Any:
        """`data` with every tensor in it moved to this process's device."""
        own = self._prepare_input if self._services.loss.settings.own_items else None
        return on_device(data, self._session.device, own)

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """The context of the forward and the loss: mixed precision."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """The mixed-precision context of this run; null for fp32. `cache_enabled` has no effect."""
        return self._engine.autocast()

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, float, int, int, int]:
        """The lengths of a run over a loader.

        Args:
            args: the arguments of the run; its batch sizes, epochs and `max_steps` count.
            dataloader: a training loader, as `get_train_dataloader` returns; it may have no length.

        Returns:
            (epochs, updates per epoch, samples of one epoch, samples of the run, samples of one update,
            micro-batches per epoch, updates of the run)
        """
        plan = self._plans.of(args)
        return preparation.planned_lengths(
            args, plan, self._session.data_ranks, dataloader, self.num_examples
        )

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Samples of one update: micro-batch, times accumulation, times ranks; by `args`, or the Trainer's if None."""
        return self._plans.of(args or self.args).batches.update

    # --- data ---------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The training loader. Override it to return any iterable of batches; each rank then iterates its own.

        Raises:
            DataError: there is no training dataset, or it is empty.
        """
        if self.train_dataset is None:
            raise DataError(
                "training needs a train_dataset: pass `train_dataset=` or override `get_train_dataloader`"
            )
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self.args.train_batch_size,
            # Of an override alone: otherwise the loader builds its order, with the sizes of batches.
            sampler_fn=self._get_train_sampler
            if hooks.overrides(self, Trainer, "_get_train_sampler")
            else None,
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of one evaluation set: a dataset, or the name of one of the sets given as `eval_dataset`.

        Raises:
            DataError: there is none, or the name is unknown.
        """
        return self._get_dataloader(
            dataset=loading.named_dataset(eval_dataset, self.eval_dataset),
            description="Evaluation",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
            dataloader_key=eval_dataset if isinstance(eval_dataset, str) else "eval",
        )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader that `predict` runs over `test_dataset`, in the dataset's order."""
        return self._get_dataloader(
            dataset=test_dataset,
            description="test",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[..., Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """The loader of any dataset, which `get_train_dataloader` and its siblings return. Override it to change all.

        Args:
            description: what the dataset is for, in the log.
            batch_size: samples of a micro-batch, or of a batch of an evaluation, on each process.
            sampler_fn: makes a torch sampler of the dataset; None, or one that returns None: the loader orders samples.
            is_training: as for `train_dataset`; otherwise in the dataset's order, each sample once over all ranks.
            dataloader_key: the name of the evaluation set, whose loader is kept if its workers are persistent.
        """
        used, collate = self._with_used_columns(dataset, description.lower())
        plan = self._plan
        if is_training:
            return loading.training_loader(plan, dataset, used, collate, sampler_fn, batch_size)
        given = dataset, self.data_collator, self._signature_columns
        return self._services.eval_loaders.loader(
            plan, given, (used, collate), sampler_fn, batch_size, self._services.fitter.eval, dataloader_key
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of training samples as a torch sampler, a function of the seed and the epoch; None for a stream.
        Override it for another order. `train_dataset`: by default that of the Trainer.
        """
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return loading.training_order(self._plan, dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """The order of evaluation samples as a torch sampler, for overrides; by default that of the dataset."""
        return None

    def _set_signature_columns_if_needed(self) -> None:
        """Set `_signature_columns`: the arguments of the model's forward, and the labels. Override it to add yours."""
        if self._signature_columns is None:
            self._signature_columns = columns.signature_columns(innermost(self.model), self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The dataset without the columns that the model's forward does not take; itself if its samples are no rows of
        columns. `description`: what it is for, in the log.
        """
        return columns.select_columns(dataset, self._used_columns(), description or "training")

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """A collator that removes such columns from samples that are dicts, and then calls `data_collator`."""
        used = self._used_columns()
        return (
            columns.ColumnCollator(data_collator, used, description or "training") if used else data_collator
        )

    def _used_columns(self) -> list[str]:
        """The columns that are kept; empty if all are."""
        if not self.args.remove_unused_columns:
            return []
        self._set_signature_columns_if_needed()
        return self._signature_columns or []

    def _with_used_columns(self, dataset: Any, what: str) -> tuple[Any, Any]:
        if getattr(dataset, "column_names", None) is not None and hasattr(dataset, "remove_columns"):
            return self._remove_unused_columns(dataset, what), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, what)

    def num_examples(self, dataloader: Any) -> int:
        """Samples of `dataloader` over all ranks: the length of its dataset, else estimated from its own, in batches.

        Raises:
            TypeError: it has neither.
        """
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError, NotImplementedError):
            ranks = self._session.data_ranks.size
            return len(dataloader) * self.args.train_batch_size_of(ranks) * ranks

    # --- optimizer and schedule ---------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `self.optimizer` and `self.lr_scheduler`, if they are not set yet; `num_training_steps` are the updates
        of the whole run.
        """
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Set and return `self.optimizer`, over the trainable parameters of `model` (None: of `self.model`). One
        that exists is kept.
        """
        if self.optimizer is None:
            target = self.model if model is None else model
            plan, given = self._plan.optimizer, self.optimizer_cls_and_kwargs
            if given is None and hooks.overrides(self, Trainer, "get_optimizer_cls_and_kwargs"):
                given = self.get_optimizer_cls_and_kwargs(self.args, target)
            decaying = self.get_decay_parameter_names(target)
            self.optimizer = optimization.new_optimizer(target, plan, given, decaying)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Set and return `self.lr_scheduler`; an existing one is kept.

        Args:
            num_training_steps: updates of the whole run.
            optimizer: whose learning rates are set; None: `self.optimizer`.

        Raises:
            ConfigError: there is no optimizer.
        """
        if self.lr_scheduler is None:
            target = self.optimizer if optimizer is None else optimizer
            warmup = self.args.get_warmup_steps(num_training_steps)
            self.lr_scheduler = optimization.new_scheduler(self._plan, target, num_training_steps, warmup)
            self._made_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], Any]:
        """The optimizer's class and keywords that `args` ask for. An override may choose them by `model`, which is not
        read here.
        """
        return optimization.class_and_keywords(args)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters of `model` that weight decay applies to: all but norms and biases."""
        return optimization.decay_parameter_names(model)

    def get_learning_rates(self) -> list[float]:
        """The present learning rate of each parameter group."""
        return [group["lr"] for group in optimization.existing(self.optimizer).param_groups]

    def get_optimizer_group(self, param: nn.Parameter | None = None) -> Any:
        """The parameters of each group; with `param`, the one group that holds it (None if there is none). Raises
        ConfigError if there is no optimizer yet.
        """
        groups = optimization.existing(self.optimizer).param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(p is param for p in group["params"])), None)

    def get_num_trainable_parameters(self) -> int:
        """The number of elements of all parameters that are trained."""
        return count_elements(p for p in self.model.parameters() if p.requires_grad)

    def _get_learning_rate(self) -> float:
        """The learning rate of the first group; for overrides, which a run calls as each update begins, for reports."""
        return float(self.get_learning_rates()[0])

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics over the evaluation data, exact for every batch size and number of ranks.

        Args:
            eval_dataset: another dataset than the Trainer's, the name of one of its sets, or a dict of datasets;
                each set of a dict is evaluated under its own name (`eval_name_loss`).
            ignore_keys: keys of the model's output that are not predictions.
            metric_key_prefix: first part of the metrics' names.

        Returns:
            `{prefix}_loss`, the metrics of `compute_metrics`, runtime and throughput, and the epoch.
        """
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, Mapping):
            metrics: dict[str, float] = {}
            for name, dataset in chosen.items():
                # By its name, under which the loader of the set is kept.
                one = name if eval_dataset is None else dataset
                metrics.update(self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        preparation.begin_call(self, Trainer, self._services, "eval", f"evaluate() of {metric_key_prefix!r}")
        started, loss_only = Moment(), True if self.compute_metrics is None else None
        with self._services.evaluator.own_randomness():
            loader = self.get_eval_dataloader(eval_dataset)
            output = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, metric_key_prefix)
        output.metrics.update(
            reports.evaluation_speed(self.args, self._session, "eval", metric_key_prefix, started, output)
        )
        self.log(output.metrics)
        self._services.events.fire("on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for every sample, in the dataset's order, with metrics if the data has labels.

        Args:
            test_dataset: as an evaluation dataset of the constructor; labels are not required.
            ignore_keys: keys of the model's output that are not predictions; None: those that the model's configuration
                names.
            metric_key_prefix: first part of the metrics' names.

        Returns:
            Arrays of one row per sample (tuples of them for several outputs or label columns). Rows of different
            widths are padded with -100.
        """
        preparation.begin_call(self, Trainer, self._services, "test", f"predict() of {metric_key_prefix!r}")
        started = Moment()
        with self._services.evaluator.own_randomness():
            loader = self.get_test_dataloader(test_dataset)
            output = self.evaluation_loop(loader, "Prediction", None, ignore_keys, metric_key_prefix)
        output.metrics.update(
            reports.evaluation_speed(self.args, self._session, "test", metric_key_prefix, started, output)
        )
        self._services.events.fire("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over a loader and join the results of all ranks.

        Args:
            dataloader: this rank's part of the data, as `get_eval_dataloader` returns.
            description: "Prediction" for `predict`; anything else is an evaluation.
            prediction_loss_only: keep nothing but the loss; None: as in the arguments.
            ignore_keys: keys of the model's output that are not predictions; None: those that the model's configuration
                names.
            metric_key_prefix: first part of the metrics' names.
        """
        self._divide_in_stages()
        hooks.wrap_model(self, training=False)
        described = hooks.evaluation_of(
            self,
            self._plan.evaluations,
            self._model_writer.strategy,
            ignore_keys,
            prefix=metric_key_prefix,
            loss_only=prediction_loss_only,
            predicting=description == "Prediction",
        )
        return self._services.evaluator.run(dataloader, described, hooks.loss_hooks(self, Trainer))

    def _divide_in_stages(self) -> None:
        """Divide a model that a pipeline is to train, if it is not divided yet. Collective."""
        if (staged := services.spread_in_stages(self.model, self._engine, self._session)) is not None:
            self._writer = self._new_writer(staged)

    def generating(self) -> contextlib.AbstractContextManager[None]:
        """Context in which every process may call `self.model.generate`, however the model is spread over them: in
        evaluation mode, with the weights that are evaluated. Random generators are restored at its end. Collective.
        """
        return self._services.evaluator.generating(self._model_writer.strategy)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss, predictions and labels of one batch, None for those it lacks. Override it for a step of your own.

        Args:
            model: what to run the forward through, in evaluation mode.
            inputs: the collated batch, in host memory.
            prediction_loss_only: return None for predictions and labels.
            ignore_keys: keys of the model's output that are not predictions; None: those that the model's configuration
                names.
        """
        labelled = evaluator.has_labels(inputs, self.label_names)
        given = self._services.loss.in_evaluation(self.count_targets, inputs)
        inputs = self._prepare_inputs(inputs)
        keys = evaluation.ignored_keys(self.model) if ignore_keys is None else ignore_keys
        labels = None
        if isinstance(inputs, Mapping) and labelled:
            labels = detach(evaluation.labels_of(inputs, self.label_names))
        script = self._services.loss.script
        with torch.no_grad(), self.compute_loss_context_manager(), script.watching(self.args):
            if labelled or evaluator.asks_for_loss(inputs, self.can_return_loss):
                if not self.label_names:  # none are needed, and metrics get none
                    labels = ()
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True, **given)
                loss = without_gradient(script.undivided(loss))
                # With these the model gets no labels, so the first of a tuple is not a loss.
                by_model = not (self._services.loss.settings.smoothing or self.compute_loss_func is not None)
                has_loss = evaluator.output_has_loss(outputs, by_model)
            else:
                loss, outputs, has_loss = None, call_model(model, inputs), False
            if prediction_loss_only:  # logits of divided rows are gathered when they are read
                return loss, None, None
            _, logits = evaluation.split_outputs(outputs, has_loss=has_loss, ignore_keys=keys)
        return loss, detach(logits), labels

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Save a checkpoint of the run. Every rank calls it; see `RunCheckpoints.save`."""
        with self.inherited_work.get("_save_checkpoint", contextlib.nullcontext)():
            script = hooks.saved_by(self, Trainer, self._written_beside())
            _of_run(self._run).save_checkpoint(script, wait=not self.is_in_train)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """A part of what a run saves as a whole; for overrides, which are called after each save with its folder."""
        self._do_inherited("_save_optimizer_and_scheduler", SAVED)

    def _save_rng_state(self, output_dir: str) -> None:
        """As `_save_optimizer_and_scheduler`."""
        self._do_inherited("_save_rng_state", SAVED)

    def _save_scaler(self, output_dir: str) -> None:
        """As `_save_optimizer_and_scheduler`."""
        self._do_inherited("_save_scaler", SAVED)

    def _checkpoint_committed(self) -> None:
        """Called once a checkpoint of the run is committed, after `on_save`. Does nothing; for subclasses."""

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Record the metrics of an evaluation; return True if it is the best so far."""
        return _of_run(self._run).checkpoints.best.observe(metrics)

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights into the model, verified."""
        _of_run(self._run).restorer.load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model. Override it to load them in another way."""
        _of_run(self._run).restorer.load_weights(
            Path(resume_from_checkpoint), self.model if model is None else model
        )

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of keys that `load_state_dict` reported missing or unexpected; for overrides of the two above."""
        defaults.warn_of_keys(self.model, load_result)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model that trains to a device, unless it is on several or has no values there."""
        defaults.place_model(model, device)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Called before the first update, after the engine restored optimizer and schedule of `checkpoint` (None:
        the run starts afresh). Does nothing; override it to restore states of your own.
        """

    def _load_callback_state(self) -> None:
        """Restore callbacks from `state.stateful_callbacks`, as the arguments ask. For scripts that set a state
        themselves: the engine restores a checkpoint's.
        """
        if self.args.restore_callback_states_from_checkpoint:
            self._services.events.restore_callbacks(restore_args=True)

    # --- reports ------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add `logs` to the history and call `on_log` of the callbacks. Override it to add values of your own.

        Args:
            logs: names and values; `epoch` is added, and the token count if `include_num_input_tokens_seen`.
            start_time: when training began, in seconds, for tokens per second.
        """
        count_tokens = self.args.include_num_input_tokens_seen != "no"
        first_tokens = 0 if self._run is None else self._run.first_tokens
        reports.complete_logs(logs, self.state, count_tokens, start_time, first_tokens)
        self._services.events.add_log(logs)

    def reported_figures(self) -> dict[str, float]:
        """Return what a report of the run has beside its losses; override it. Empty by default. Every rank calls it, so
        that it may be collective; `log` is also called on single ranks, by scripts.
        """
        return {}

    def data_facts(self) -> dict[str, Any]:
        """Return names and values that the report of a run shows of its data; override it. Empty by default."""
        return {}

    def data_samples(self, batch: Any) -> list[dict[str, Any]]:
        """Return rows that the page of a run shows of its data, as its model gets them; override it. By default the
        first rows of `batch`, if a tokenizer is known.

        Args:
            batch: the first one of a run.

        Returns:
            Each with `name`, `tokens`, `trained` (how many), `pieces` (pairs of a text and whether it is trained on)
            and, for a row with one label, `label`.
        """
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        return batch_rows.rows_of_batch(batch, self.model, tokenizer)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print `metrics` of one `split` ("train", "eval", ...) as aligned lines, on the main process."""
        if self.is_world_process_zero():
            reports.show_metrics(split, self.metrics_format(metrics))

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, Any]:
        """`metrics` for people: times as h:m:s, memory in MB, FLOPs in GF, other floats with four digits."""
        return {name: reports.readable(name, value) for name, value in metrics.items()}

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write `metrics` to `{split}_results.json` in the output folder, and merge them into `all_results.json`
        (`combined`); on the main process.
        """
        if self.is_world_process_zero():
            reports.write_metrics(self.output_folder, split, metrics, combined)

    def save_state(self) -> None:
        """Write `trainer_state.json` into the output folder, on the main process."""
        if self.is_world_process_zero():
            folder = self.output_folder
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """FLOPs of one forward and backward: 6 x parameters x tokens. Override it for another estimate, which
        `state.total_flos` adds up.

        Parameters of embedding tables are not counted: they are looked up, not multiplied. A table that is the weight
        of the output layer too is counted once; transformers leaves it out.

        Args:
            inputs: a batch; its tokens are the elements of the model's main input. Without that input the result is 0.

        Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1.
        """
        main = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 0 if main is None else reports.flops_per_position(self.model) * int(main.numel())

    # --- files and the Hub --------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model (weights, configuration, tokenizer) so that `from_pretrained` reads it; on the main
        process, and with `save_on_each_node` on one of each machine that has a disk of its own; with `push_to_hub` also
        upload it.

        Collective if the model is sharded, or with `save_on_each_node`; else the main process may call it alone, and
        others do not wait for it.

        Args:
            output_dir: a folder or a URL; the run's output folder by default.
            _internal_call: do not upload. A call with `output_dir` does not upload either.

        Raises:
            CheckpointError: it cannot be written; of a sharded model on all processes. What else an override raises
                stays what it is on the process that raised it.
        """
        place = self.args.resolve_path(str(output_dir)) if output_dir else self.args.output_path
        all_ranks, writes = self._session.all_ranks, self.is_world_process_zero()
        if self.args.save_on_each_node:
            writes = (
                all_ranks.rank
                == (self._folder or run_folder.RunFolder(self.args, all_ranks)).disks.writer_rank
            )
        with self._services.evaluator.averaged_weights():
            model_writer.save_final(place, self._model_writer, self._save, all_ranks, writes)
        if self.is_world_process_zero() and not (_internal_call or output_dir):
            is_adapter = self._model_writer.adapter is not None
            publishing.model_saved(self.args, self.callback_handler, self.output_folder, adapter=is_adapter)

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        """Write the model's files into a folder. Override it for files of your own; checkpoints call it too.

        Args:
            state_dict: the weights to write instead of the model's own; an empty one writes none.
        """
        folder = Path(output_dir or self.output_folder)
        self._model_writer.write(folder, state_dict, self._written_beside())

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write a draft of the model's card, `README.md` in the output folder, on the main process.

        The arguments are facts that the run cannot know; the rest is filled in. Tags and the licence of an existing
        card are kept.

        Args:
            language: codes of languages, such as "en".
            license: its identifier on the Hub, such as "apache-2.0".
            tags: added to those of the run.
            model_name: title of the card; None: the name of the output folder.
            finetuned_from: the base model, by its name on the Hub; None: as the model's configuration names it.
            tasks: identifiers of tasks on the Hub, such as "text-classification".
            dataset_tags: ids of datasets on the Hub.
            dataset: their names for people, in the same order; None: the ids.
            dataset_args: their configurations, in the same order.
        """
        if self.is_world_process_zero():
            given = card.CardFacts(
                model_name or self.output_folder.absolute().name,
                _listed(language),
                license,
                _listed(tags),
                finetuned_from,
                _listed(tasks),
                _listed(dataset_tags),
                _listed(dataset or dataset_tags),
                _listed(dataset_args),
            )
            data = self.train_dataset if self.eval_dataset is None else self.eval_dataset
            found = card.of_run(
                given, self.model, self.args.to_dict(), self.state, data, self._session.all_ranks.size
            )
            card.write_card(self.output_folder / card.CARD, found)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository `args.hub_model_id` if it does not exist, on the main process. `token` replaces
        `args.hub_token`.
        """
        if self.is_world_process_zero():
            publishing.publisher(self.args, self.callback_handler, self.output_folder, token).open()

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model, write its card, and upload both. Collective.

        Args:
            commit_message: None: "End of training".
            blocking: wait for the end of the upload.
            token: replaces `args.hub_token`.
            revision: the branch that receives the commit, instead of `args.hub_revision`.
            **kwargs: facts for the card, as in `create_model_card`.

        Returns:
            The address of the commit; without `blocking` its `concurrent.futures.Future`, at once. None on processes
            other than the main one, which uploads.

        Raises:
            ConfigError: the Hub refuses the name or the token, or cannot be reached; CheckpointError with the reason on
                the other processes. HubError: the upload failed, or did not end within `hub_wait`.
        """
        self.save_model(_internal_call=True)
        self._services.events.fire("on_push_begin")
        folder = self.output_folder

        def start() -> Any:
            publisher = publishing.publisher(self.args, self.callback_handler, folder, token, revision)
            self.create_model_card(**publishing.card_facts(publisher, self.model, kwargs))
            message, is_adapter = commit_message or "End of training", self._model_writer.adapter is not None
            return publisher, publishing.push(publisher, folder, message, adapter=is_adapter)

        started = publishing.on_main(self._session.all_ranks, start)
        if started is None:
            return None
        publisher, commit = started
        if not blocking:
            return commit
        publisher.finish()
        return commit.result()

    def end(self) -> None:
        """Close the process group: the last call of a script, after everything that needs the other processes."""
        self.accelerator.end_training()

    # --- names of older libraries, which Windlass does not call -------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The earlier name of `processing_class`."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], Tensor]:
        """Up to `num_batches` batches of `epoch_iterator`, and the number of targets in them over all ranks: a scalar
        tensor on `device` (None: this process's). Collective. A run calls overrides of it, with the micro-batches of
        each update before its first forward; see docs/losses.md.
        """
        batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device | None = None) -> Tensor:
        """Targets in these batches over all ranks, as a scalar on `device`. Collective."""
        own = torch.tensor(sum(map(self.count_targets, batch_samples)), dtype=torch.float64)
        add = self.inherited_work.get("_get_num_items_in_batch", self._session.data_ranks.sum)
        return as_count(float(add(own)), device or self._session.device)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Concatenate the tensors of all ranks. For scripts that call it: the engine joins evaluations itself."""
        return self.accelerator.gather(tensors)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """`model`, for overrides, which may change it: called before a run prepares it, and before each evaluation. The
        engine wraps it itself.
        """
        return model

    # For scripts that add to it: a run sums the losses of its reports itself.
    _total_loss_scalar = 0.0
    # The work of inherited methods, by their names, while a run calls a script's.
    inherited_work: Mapping[str, Callable[..., Any]] = MappingProxyType({})

    def _do_inherited(self, name: str, fix: str) -> Any:
        if name not in self.inherited_work:
            raise ConfigError(Problem(name, "called", fix))
        return self.inherited_work[name]()

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Tensor,
        grad_norm: Tensor | float | None,
        model: nn.Module,
        trial: Any,
        epoch: int,
        ignore_keys_for_eval: list[str] | None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save, each if it is due; for overrides, which a run calls after each update and each epoch.
        They call it with what they got, or parts of that: the run knows it all. Collective.

        Args:
            tr_loss: the sum of the losses since the last report, a scalar whose mean over processes is the run's.
            grad_norm: of the last update.
            model: what forwards run through.
            trial: None.
            epoch: the number of the epoch, from 0.
            ignore_keys_for_eval: as in `train`.
            start_time: when training began.
            learning_rate: of the last update.
        """
        fix = "a run calls it between updates: set control flags in a callback, or override it"
        self._do_inherited("_maybe_log_save_evaluate", fix)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """`evaluate`, for overrides, which a run calls for each evaluation within it: what they return decides which
        model is the best, and is what a schedule gets that follows a metric.

        Args:
            trial: None.
            ignore_keys_for_eval: as in `train`.
            skip_scheduler: before the first update.
        """
        with run_clock().within(EVALUATION):
            metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        if not skip_scheduler and (observe := self.inherited_work.get("_evaluate")):
            observe(metrics)
        return metrics

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random generators to those of the checkpoint that a run continues; for overrides, which a run calls
        once all else is restored. One that names it and does not call it leaves them as they were.

        Args:
            checkpoint: its folder.
        """
        self._do_inherited("_load_rng_state", "a run calls it as it resumes: override it")

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the gradients of an update by `max_grad_norm`; for overrides, which a run calls after the last backward
        of an update, if `max_grad_norm` is set. Gradients have no loss scale then, and are those of all processes. The
        run reports the norm before this is called, whatever an override returns.

        Args:
            model: what forwards run through.

        Returns:
            The norm before clipping, or what a `clip_grad_norm_` that was assigned to the accelerator returns.
        """
        if hooks.replaced(self.accelerator, "clip_grad_norm_"):
            norm: Tensor = self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        else:
            fix = "a run calls it in an update: override it, or use accelerator.clip_grad_norm_"
            norm = self._do_inherited("_clip_grad_norm", fix)
        return norm

    @property
    def _globalstep_last_logged(self) -> int:
        """The step of the last report. A script that has reported the updates since then by itself sets it to the
        present step, and they are in no later report. Setting it is collective.
        """
        return self.state.global_step - (0 if self._run is None else self._run.ledger.updates)

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, step: int) -> None:
        if step != self.state.global_step:
            raise ConfigError(
                Problem("_globalstep_last_logged", step, "it can be set to the present step only")
            )
        if self._run is not None:
            self._run.reports.progress()

    def gather_function(self, tensors: Any) -> Any:
        """`accelerator.gather_for_metrics` of `tensors`; copied evaluation loops call and assign it."""
        return self.accelerator.gather_for_metrics(tensors)

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Callable[..., Any], Any]:
        """A context without effect, and `inputs`, for copied steps: the engine divides rows itself."""
        return contextlib.nullcontext, inputs

    @functools.cached_property
    def _memory_tracker(self) -> TrainerMemoryTracker:
        """Measures the stages of copied methods: `evaluate` and `predict` measure theirs by the session."""
        return memory_stages.TrainerMemoryTracker(self.args.skip_memory_metrics, memory=self._session.memory)

    def store_flos(self) -> None:
        """Kept for scripts that call it; `state.total_flos` is current after every update."""

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Kept for scripts that call it; a callback reports every evaluation to the search."""

    def get_tp_size(self) -> int:
        """Ranks that divide each layer."""
        return self._plan.dist.tensor

    def get_cp_size(self) -> int:
        """Ranks that divide one sequence, among which keys and values travel."""
        return self._plan.dist.context

    def get_sp_size(self) -> int:
        """Ranks that divide one sequence, and exchange heads for the attention."""
        return self._plan.dist.sequence

    # --- a search over hyperparameters ----------------------------------------------------------------------------

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | Mapping[str, Any] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | HPSearchBackend | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train once for each set of hyperparameters, all processes together, and return the best.

        The study is in `search.json` of `args.output_dir`, and each trial is a run in a folder below it: a search that
        was interrupted or killed continues where it was, if this is called again. Arguments are put back at the end.

        Args:
            hp_space: trial -> arguments by name, from `trial.suggest_float`, `suggest_int` and `suggest_categorical`;
                or data: name -> a list of values, or {low, high, step, log}. By default that of the backend.
            compute_objective: metrics of a trial's last evaluation -> a number, or one for each direction. By default
                the sum of the metrics that are not a loss; `eval_loss` if there are none.
            n_trials: the number of trials in the study, those of earlier calls included.
            direction: "minimize" or "maximize"; a list for several objectives.
            backend: "optuna", "random" or "grid"; "ray" and "wandb" name the words of the space. By default optuna if
                it is installed, else random.
            hp_name: trial -> name of its run and its folder, another one for each trial.
            **kwargs: `sampler`, `pruner`, `study_name` of optuna; `seed`, `pruner="median"` of the others.

        Returns:
            The best run; with several directions those that no other one surpasses.

        Raises:
            ConfigError: there is no `model_init` or no evaluation set, `output_dir` is a URL, an option has no effect,
                or the space names what is not an argument. ModelError: no trial is complete.
        """
        from windlass.search.default_spaces import BestRun
        from windlass.search.search import Search
        from windlass.search.search_settings import SearchSettings

        settings = SearchSettings(
            hp_space, compute_objective, n_trials, direction, backend, hp_name, kwargs, self.args.seed
        )
        if self.model_init is None:
            fix = "is needed: each trial begins with a new model"
            raise ConfigError(Problem("model_init", None, fix))
        if not hooks.has_evaluation_data(self):
            fix = "is needed: trials are compared by their evaluations"
            raise ConfigError(Problem("eval_dataset", None, fix))
        search = Search(settings, self.args.output_path, self._session.all_ranks, self.args.to_dict())
        best = [
            BestRun(str(one.number), one.values if len(one.values) > 1 else one.values[0], one.params)
            for one in search.run(self._run_trial)
        ]
        if not best:
            raise ModelError(
                "no trial of the search is complete: start it again if it was interrupted; if trials failed, change "
                "hp_space or compute_objective, and choose another output_dir"
            )
        return best if len(settings.directions) > 1 else best[0]

    def _run_trial(self, trial: ChosenTrial, watch: TrialWatch) -> dict[str, float] | None:
        """Train a trial, from its newest checkpoint if it has one; return the metrics of its last evaluation, or None
        if the user interrupted it.
        """
        from windlass.search.search import arguments_of, last_evaluation

        assert self.model_init is not None
        args = self.args
        self.args = arguments_of(trial, args, defaults.takes_trial(self.model_init))
        self.add_callback(watch)
        try:
            self.train(resume_from_checkpoint="auto", trial=trial)
            if self._run is not None and self._run.was_interrupted:
                return None
            return last_evaluation(self.state.log_history)[1] or self.evaluate()
        finally:
            self.remove_callback(watch)
            self.args = args


def _of_run(run: Run | None) -> Run:
    """Return the run. Raises ModelError if there was none."""
    if run is None:
        raise ModelError("there is no run yet: call train() first")
    return run


def _listed(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
