"""The Trainer: a facade with the names and signatures that scripts know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from windlass.callbacks.handler import CallbackHandler
from windlass.config.arguments import TrainingArguments
from windlass.core.clock import Moment
from windlass.core.errors import DataError
from windlass.core.logs import set_verbosity
from windlass.core.trees import detach
from windlass.core.types import EvalLoopOutput, PredictionOutput, TrainOutput
from windlass.trainer.lazy_modules import (
    binding,
    columns,
    defaults,
    evaluation,
    evaluator,
    interrupting,
    loading,
    model_writer,
    optimization,
    preparation,
    publishing,
    resolve,
    run_folder,
    services,
)  # fmt: skip
from windlass.trainer.losses import call_model, check_differentiable, checked_batch, without_gradient
from windlass.trainer.reports import complete_logs, evaluation_speed
from windlass.trainer.session import Session
from windlass.trainer.trainer_names import TrainerNames
from windlass.trainer.wrappers import innermost, labels_in_signature, returns_loss_by_default

if TYPE_CHECKING:
    from windlass.trainer.interruption import Interruption
    from windlass.trainer.model_writer import ModelWriter
    from windlass.trainer.run import Run
    from windlass.trainer.run_folder import RunFolder
    from windlass.transforms.strategy import Strategy


class Trainer(TrainerNames):
    """Trains, evaluates and predicts with a PyTorch model.

    Args:
        model: any `nn.Module` whose forward returns a loss (first of a tuple, `loss` of a mapping or object), or
            whose loss `compute_loss_func` or an overridden `compute_loss` computes. Models of transformers do.
        args: the configuration; defaults to `TrainingArguments()`.
        data_collator: list of samples -> batch. By default padding with the tokenizer, or stacking.
        train_dataset, eval_dataset: map-style or iterable datasets, lists of dicts, Hugging Face datasets;
            evaluation data may be a dict of named sets.
        processing_class: tokenizer or processor, saved with the model. `tokenizer=` is its earlier name.
        model_init: makes a new model at each `train()`, after seeding; instead of `model`.
        compute_loss_func: `(outputs, labels, num_items_in_batch=None) -> loss`.
        compute_metrics: `EvalPrediction -> dict`.
        callbacks: classes or instances; `callback=` is accepted too.
        optimizers: an optimizer and a scheduler to use.
        optimizer_cls_and_kwargs: a class and keywords to build the optimizer from, instead of `args.optim`.
        preprocess_logits_for_metrics: `(logits, labels) -> logits`, before they are kept for metrics.

    Raises:
        ConfigError, ModelError: whatever can be known to be wrong before training.
    """

    # True: `compute_loss` is divided by the count of the whole update and multiplied by the number of ranks. False: it
    # is a mean over its micro-batch, or divided by its count. None: that too, unless its code takes care of the ranks.
    loss_is_scaled_for_ga: bool | None = None

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
        self.args = defaults.checked_arguments(args)
        defaults.seed_all(self.args)
        set_verbosity(self.args.get_process_log_level())
        self._session = Session.open(self.args)
        self.create_accelerator_and_postprocess()
        self.model_init, self.is_in_train = model_init, False
        self.place_model_on_device = getattr(self.args, "place_model_on_device", None) is not False
        self.data_collator = defaults.checked_collator(data_collator, processing_class or tokenizer)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = defaults.one_of("processing_class", processing_class, "tokenizer", tokenizer)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs, self._made_scheduler = optimizer_cls_and_kwargs, False
        self._run: Run | None = None
        self._folder: RunFolder | None = None
        self._take_model(defaults.first_model(model, None if model_init is None else self.call_model_init))
        makers = binding.replaced(self, *defaults.MAKERS)
        defaults.check_given(self.args, optimizers, optimizer_cls_and_kwargs, model_init, makers)
        callbacks = defaults.one_of("callbacks", callbacks, "callback", callback) or []
        handler = CallbackHandler(
            [*defaults.default_callbacks(self.args, self.output_folder), *callbacks],
            self.model, self.processing_class, self.optimizer, self.lr_scheduler,
        )  # fmt: skip
        self._services = services.Services.open(
            self._session, self.accelerator, self._engine, lambda: self.args, handler
        )
        self._services.loss.take_model(self.model, self.label_names)
        self._services.loss.adopt(binding.loss_hooks(self, Trainer))
        self.add_callback(defaults.display_callback(self.args))
        self._session.memory.end("init")
        self._services.events.fire("on_init_end")

    # --- construction -----------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make `self.accelerator`: device, ranks and precision."""
        self._engine, self.accelerator = services.open_accelerator(
            self._session,
            lambda: self.args,
            lambda: (self.model, self.model_wrapped, self.optimizer, self.lr_scheduler),
        )

    def _take_model(self, model: nn.Module) -> None:
        if self.place_model_on_device:
            defaults.place_model(model, self._session.device)
        self.model = self.model_wrapped = model
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
            lambda: self.processing_class or getattr(self.data_collator, "tokenizer", None),
            lambda: self.args.to_dict(),
        )

    @property
    def _model_writer(self) -> ModelWriter:
        if self._writer.model is not self.model:  # a script may assign another one
            self._writer = self._new_writer(None)
        return self._writer

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
            resume_from_checkpoint: True continues from the newest verified checkpoint of `args.output_dir`; "auto"
                does the same, or starts a new run if there is none; a path continues from that checkpoint. The run ends
                with the same bits as one that was never interrupted.
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
            self.optimizer, self.lr_scheduler = None, None
        if self._made_scheduler:  # for the length of an earlier run
            self.lr_scheduler, self._made_scheduler = None, False
        # Before any other collective.
        preparation.begin_call(self, Trainer, self._services, "train", "train()", resume)
        earlier, self._run = self._run, None
        self._folder = run_folder.RunFolder(self.args, self._session.gang)
        self._folder.take()
        self.is_in_train = True
        interruption = interrupting.Interruption(self._session, resolve.resolve_preemption(self.args))
        try:
            if earlier is not None:  # after an interrupt its thread may still write to the same folder
                earlier.checkpointer.abandon()
            with interruption.listening(lambda: self._run):
                return self._train(interruption, resume, ignore_keys_for_eval)
        except (Exception, SystemExit):
            if self._run is not None:
                self._run.checkpointer.abandon()
            raise
        finally:
            self.is_in_train, self.model_wrapped = False, self.model
            self._folder.release(None if self._run is None else self._run.saver)
            self._engine.detach()
            self._services.events.close_displays()
            if self._run is not None:
                self._run.release()

    def _train(
        self, interruption: Interruption, resume: Any, ignore_keys: list[str] | None
    ) -> TrainOutput:  # fmt: skip
        assert self._folder is not None
        publishing.opened(self.callback_handler, self._services.session.gang)
        hooks = binding.TrainHooks.of(self, Trainer, ignore_keys, self._services.evaluator)
        self._run, self._writer, checkpoint, place = preparation.prepare_run(
            self.args, self._services, hooks, interruption, self._folder, resume, optimizer=self.optimizer,
            tokenizer=self.processing_class, new_files=self._new_writer,
        )  # fmt: skip
        self.model_wrapped = self._run.executor.model
        return self._run.execute(checkpoint, place)

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
        self.accelerator.backward(loss)
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
        target count; Windlass weights it by this batch's share of the update. With `return_outputs=True` it returns
        `(loss, outputs)`.

        Raises:
            ModelError: the model returned no loss.
        """
        policy = self._services.loss
        loss, outputs = policy.default_loss(model, inputs, num_items_in_batch, self.compute_loss_func)
        return (loss, outputs) if return_outputs else loss

    def count_targets(self, batch: Any) -> float:
        """Number of targets that this batch's loss is a mean over, from a batch in host memory, before its forward.

        Override it if labels do not show the number (see docs/losses.md).
        """
        return self._services.loss.counter(batch)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch on this process's device, as a new container: hooks may take labels out of it."""
        return checked_batch(self._prepare_input(inputs), self._signature_columns)

    # --- data -------------------------------------------------------------------------------------------------------

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
            dataset=self.train_dataset, description="Training", batch_size=self.args.train_batch_size,
            sampler_fn=self._get_train_sampler, is_training=True,
        )  # fmt: skip

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of one evaluation set: a dataset, or the name of one of the sets given as `eval_dataset`.

        Raises:
            DataError: there is none, or the name is unknown.
        """
        return self._get_dataloader(
            dataset=loading.named_dataset(eval_dataset, self.eval_dataset), description="Evaluation",
            batch_size=self.args.eval_batch_size, sampler_fn=self._get_eval_sampler,
            dataloader_key=eval_dataset if isinstance(eval_dataset, str) else "eval",
        )  # fmt: skip

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader that `predict` runs over."""
        return self._get_dataloader(
            dataset=test_dataset, description="test", batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
        )  # fmt: skip

    def _set_signature_columns_if_needed(self) -> None:
        """Set `_signature_columns`: the arguments of the model's forward, and the labels. Override it to add yours."""
        if self._signature_columns is None:
            self._signature_columns = columns.signature_columns(innermost(self.model), self.label_names)

    def _with_used_columns(self, dataset: Any, what: str) -> tuple[Any, Any]:
        if not self.args.remove_unused_columns:
            return dataset, self.data_collator
        self._set_signature_columns_if_needed()
        return loading.with_columns(dataset, self.data_collator, self._signature_columns or [], what)

    # --- optimizer and schedule ---------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Set and return `self.optimizer`; an existing one is kept."""
        if self.optimizer is None:
            target = self.model if model is None else model
            cls, kwargs = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, target
            )
            decaying = self.get_decay_parameter_names(target)
            self.optimizer = optimization.new_optimizer(target, cls, kwargs, self.args, decaying)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Set and return `self.lr_scheduler`; an existing one is kept."""
        if self.lr_scheduler is None:
            target = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = optimization.new_scheduler(self.args, target, num_training_steps)
            self._made_scheduler = True
        return self.lr_scheduler

    # --- evaluation -------------------------------------------------------------------------------------------------

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
                one = name if eval_dataset is None else dataset
                metrics.update(self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        preparation.begin_call(self, Trainer, self._services, "eval", f"evaluate() of {metric_key_prefix!r}")
        started, loss_only = Moment(), True if self.compute_metrics is None else None
        with self._services.evaluator.own_randomness():
            loader = self.get_eval_dataloader(eval_dataset)
            output = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, metric_key_prefix)
        output.metrics.update(
            evaluation_speed(self.args, self._session, "eval", metric_key_prefix, started, output)
        )
        self.log(output.metrics)
        self._services.events.fire("on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for every sample, in the dataset's order, with metrics if the data has labels.

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
            evaluation_speed(self.args, self._session, "test", metric_key_prefix, started, output)
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
            description: "Evaluation" or "Prediction", for the log.
            prediction_loss_only: keep nothing but the loss; None: as in the arguments.
        """
        bound = binding.eval_hooks(self, self._model_writer.strategy, ignore_keys)
        return self._services.evaluator.run(
            dataloader, bound, resolve.resolve_evaluation(self.args), loss_only=prediction_loss_only,
            prefix=metric_key_prefix, predicting=description == "Prediction",
        )  # fmt: skip

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss, predictions and labels of one batch, None for those it lacks. Override it for a step of your own."""
        labelled = evaluator.has_labels(inputs, self.label_names)
        inputs = self._prepare_inputs(inputs)
        keys = evaluation.ignored_keys(self.model) if ignore_keys is None else ignore_keys
        labels = None
        if isinstance(inputs, Mapping) and labelled:
            labels = detach(evaluation.labels_of(inputs, self.label_names))
        with torch.no_grad(), self.compute_loss_context_manager():
            if labelled or evaluator.asks_for_loss(inputs, self.can_return_loss):
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
                loss = without_gradient(loss)
                by_model = not (self._services.loss.hooks.smoothing or self.compute_loss_func is not None)
                has_loss = evaluator.output_has_loss(outputs, by_model)
            else:
                loss, outputs, has_loss = None, call_model(model, inputs), False
            _, logits = evaluation.split_outputs(outputs, has_loss=has_loss, ignore_keys=keys)
        return (loss, None, None) if prediction_loss_only else (loss, detach(logits), labels)

    # --- reports and files --------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add `logs` to the history and call `on_log` of the callbacks. Override it to add values of your own.

        Args:
            logs: names and values; `epoch` is added, and the token count if `include_num_input_tokens_seen`.
            start_time: when training began, in seconds, for tokens per second.
        """
        count_tokens = self.args.include_num_input_tokens_seen != "no"
        first_tokens = 0 if self._run is None else self._run.first_tokens
        complete_logs(logs, self.state, count_tokens, start_time, first_tokens)
        self._services.events.add_log(logs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model (weights, configuration, tokenizer) so that `from_pretrained` reads it; on the main
        process, and with `save_on_each_node` on one of each machine that has a disk of its own; with `push_to_hub` also
        upload it.

        Args:
            output_dir: a folder or a URL; the run's output folder by default.
        """
        place = self.args.resolve_path(str(output_dir)) if output_dir else self.args.output_path
        gang, writes = self._session.gang, self.is_world_process_zero()
        if self.args.save_on_each_node:
            writes = gang.rank == (self._folder or run_folder.RunFolder(self.args, gang)).disks.writer_rank
        with self._services.evaluator.averaged_weights():
            model_writer.save_final(place, self._model_writer, self._save, gang, writes)
        if not (_internal_call or output_dir):
            publishing.model_saved(self.args, self.callback_handler, self.output_folder)

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        """Write the model's files into a folder. Override it for files of your own; checkpoints call it too.

        Args:
            state_dict: the weights to write instead of the model's own; an empty one writes none.
        """
        self._model_writer.write(Path(output_dir or self.output_folder), state_dict)
