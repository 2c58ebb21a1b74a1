"""Names of `Trainer` without state: what another object owns, what follows from its attributes, what is refused."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from windlass.callbacks.handler import CallbackHandler
from windlass.config.arguments import TrainingArguments
from windlass.config.support_rows import METHODS_REFUSED
from windlass.core.delegate import method_of, value_of, variable_of
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.locations import local_folder
from windlass.trainer.lazy_modules import card, defaults, loading, optimization, preparation, publishing
from windlass.trainer.losses import LabelSmoother, as_count, on_device
from windlass.trainer.reports import readable, show_metrics, write_metrics
from windlass.trainer.session import Session

if TYPE_CHECKING:
    from windlass.accelerator.accelerator import Accelerator
    from windlass.accelerator.engine import TrainerEngine
    from windlass.trainer.run import Run
    from windlass.trainer.services import Services


class TrainerNames:
    """The stateless base of `Trainer`. Scripts may call and override all of it."""

    args: TrainingArguments
    model: nn.Module
    model_init: Callable[..., nn.Module] | None
    accelerator: Accelerator
    # Engines that are not built; scripts look if there is one.
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False
    is_model_parallel = is_distributed_loading_by_transformers = False
    deepspeed = None
    optimizer: torch.optim.Optimizer | None
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    is_in_train: bool
    _session: Session
    _services: Services
    _engine: TrainerEngine
    _run: Run | None
    _signature_columns: list[str] | None

    def count_targets(self, batch: Any) -> float:
        raise NotImplementedError

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        raise NotImplementedError

    def _with_used_columns(self, dataset: Any, what: str) -> tuple[Any, Any]:
        raise NotImplementedError

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        raise NotImplementedError

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        raise NotImplementedError

    # --- what another object owns -----------------------------------------------------------------------------------

    state: TrainerState = variable_of("_services.events.state", "The progress of the run.")
    control: TrainerControl = variable_of("_services.events.control", "The control flags that callbacks set.")
    callback_handler: CallbackHandler = value_of("_services.events.handler", "The callbacks.")
    add_callback = method_of("callback_handler", CallbackHandler.add_callback)
    pop_callback = method_of("callback_handler", CallbackHandler.pop_callback)
    remove_callback = method_of("callback_handler", CallbackHandler.remove_callback)

    @property
    def tokenizer(self) -> Any:
        """The earlier name of `processing_class`."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

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
        factor = self._services.loss.hooks.smoothing
        return LabelSmoother(factor) if factor else None

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """Micro-batches of the current update: fewer than asked for at the end of an epoch."""
        return self.accelerator.gradient_state.micro_batches or self.args.gradient_accumulation_steps

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, value: int) -> None:
        """Each update sets it again."""
        self.accelerator.gradient_state.micro_batches = value

    @property
    def is_fsdp_enabled(self) -> bool:
        """True if the model's parameters are sharded."""
        return self._engine.dist.shard is not None

    @property
    def is_deepspeed_enabled(self) -> bool:
        """True if DeepSpeed's ZeRO divides the model among ranks."""
        return self._engine.dist.zero is not None

    @property
    def hub_model_id(self) -> str | None:
        """The repository that the model is pushed to; None without `push_to_hub`."""
        return self.args.hub_model_id if self.args.push_to_hub else None

    current_flos: float = value_of("state.total_flos", "FLOPs of the run so far.")

    @property
    def _train_batch_size(self) -> int:
        """Samples of a training loader's batch, as far as memory holds them."""
        return self.state.train_batch_size or self.args.train_batch_size

    def _get_output_dir(self, trial: Any = None) -> str:
        """`output_folder` as text."""
        return str(self.output_folder)

    @property
    def output_folder(self) -> Path:
        """The folder of this run's files on this machine: a staging folder if `output_dir` is a URL."""
        return local_folder(self.args.output_path)

    def is_local_process_zero(self) -> bool:
        """Return True on the first process of each machine."""
        return self._session.world.is_local_main

    def is_world_process_zero(self) -> bool:
        """Return True on the first process of the job."""
        return self._session.world.is_main

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """The context of the forward and the loss: mixed precision."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """The mixed-precision context of this run; null for fp32."""
        return self._engine.autocast()

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

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Save a checkpoint of the run. Every rank calls it; see `Checkpointer.save`."""
        _of_run(self._run).save_checkpoint(wait=not self.is_in_train)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model. Override it to load them in another way."""
        _of_run(self._run).load_weights(Path(resume_from_checkpoint), self.model if model is None else model)

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

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Concatenate the tensors of all ranks. For scripts that call it: the engine joins evaluations itself."""
        return self.accelerator.gather(tensors)

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights into the model, verified."""
        _of_run(self._run).checkpointer.load_best_model()

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Record the metrics of an evaluation; return True if it is the best so far."""
        return _of_run(self._run).best.observe(metrics)

    def end(self) -> None:
        """Close the process group: the last call of a script, after everything that needs the other processes."""
        self.accelerator.end_training()

    # --- data -------------------------------------------------------------------------------------------------------

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Callable[..., Any] | None = None,
        is_training: bool = False, dataloader_key: str | None = None,
    ) -> Any:  # fmt: skip
        """The loader of any dataset, which `get_train_dataloader` and its siblings return. Override it to change all.

        Args:
            description: what the dataset is for, in the log.
            batch_size: samples of a micro-batch, or of a batch of an evaluation, on each process.
            sampler_fn: makes a torch sampler of the dataset; None, or one that returns None: the loader orders samples.
            is_training: as for `train_dataset`; otherwise in the dataset's order, each sample once over all ranks.
            dataloader_key: the name of the evaluation set, whose loader is kept if its workers are persistent.
        """
        used, collate = self._with_used_columns(dataset, description.lower())
        world = self._session.world
        if is_training:
            return loading.training_loader(self.args, world, dataset, used, collate, sampler_fn, batch_size)
        given = dataset, self.data_collator, self._signature_columns
        return self._services.eval_loaders.loader(
            self.args, world, given, (used, collate), sampler_fn, batch_size, self._services.fitter.eval,
            dataloader_key,
        )  # fmt: skip

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of training samples as a torch sampler, for overrides; by default the loader orders them."""
        return None

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """The order of evaluation samples as a torch sampler, for overrides; by default that of the dataset."""
        return None

    def num_examples(self, dataloader: Any) -> int:
        """Samples of a loader over all ranks; estimated from its length if it has no dataset."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError, NotImplementedError):
            world = self._session.world.size
            return len(dataloader) * self.args.train_batch_size_of(world) * world

    def get_total_train_batch_size(self, args: Any = None) -> int:
        """Samples of one update: micro-batch, times accumulation, times ranks."""
        return preparation.samples_of_update(args or self.args, self._session.world)

    def set_initial_training_values(
        self, args: Any, dataloader: Any
    ) -> tuple[int, int, int, float, int, int, int]:
        """The lengths of a run over this loader.

        Returns:
            (epochs, updates per epoch, samples of one epoch, samples of the run, samples of one update,
            micro-batches per epoch, updates of the run)
        """
        gang, world = self._session.gang, self._session.world
        return preparation.planned_lengths(args, gang, world, dataloader, self.num_examples)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], Tensor]:
        """Up to `num_batches` batches of an iterator, and the number of targets in them over all ranks. Windlass does
        not call it: the engine gets its micro-batches from the loader.
        """
        batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device | None = None) -> Tensor:
        """Targets in these batches over all ranks, as a scalar on `device`. Collective."""
        own = torch.tensor(sum(map(self.count_targets, batch_samples)), dtype=torch.float64)
        return as_count(float(self._session.gang.sum(own)), device or self._session.device)

    def _prepare_input(self, data: Any) -> Any:
        """`data` with every tensor in it moved to this process's device."""
        return on_device(data, self._session.device, self._prepare_input)

    def get_tp_size(self) -> int:
        """Ranks that share one copy of each layer (tensor parallelism is not built yet): 1."""
        return 1

    def get_cp_size(self) -> int:
        """Ranks that share one sequence (context parallelism is not built yet): 1."""
        return 1

    def get_sp_size(self) -> int:
        """Ranks that share one sequence by heads (sequence parallelism is not built yet): 1."""
        return 1

    # --- optimizer --------------------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `self.optimizer` and `self.lr_scheduler`, if they are not set yet."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: Any, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], Any]:
        """The optimizer's class and keywords that these arguments ask for."""
        return optimization.class_and_keywords(args)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to: all but norms and biases."""
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
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def _get_learning_rate(self) -> float:
        """The learning rate of the first group, for reports."""
        return float(self.get_learning_rates()[0])

    # --- reports ----------------------------------------------------------------------------------------------------

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics of one split ("train", "eval", ...) as aligned lines, on the main process."""
        if self.is_world_process_zero():
            show_metrics(split, self.metrics_format(metrics))

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Metrics for people: times as h:m:s, memory in MB, FLOPs in GF, other floats with four digits."""
        return {name: readable(name, value) for name, value in metrics.items()}

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write `{split}_results.json` into the output folder, and merge into `all_results.json` (`combined`)."""
        if self.is_world_process_zero():
            write_metrics(self.output_folder, split, metrics, combined)

    def save_state(self) -> None:
        """Write `trainer_state.json` into the output folder, on the main process."""
        if self.is_world_process_zero():
            folder = self.output_folder
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def store_flos(self) -> None:
        """Kept for scripts that call it; `state.total_flos` is current after every update."""

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """FLOPs of one forward and backward: 6 x parameters x tokens, or the model's own estimate if it has one.

        Parameters of embedding tables are not counted: they are looked up, not multiplied.

        Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1.
        """
        own = getattr(self.model, "floating_point_ops", None)
        if callable(own):
            return int(own(inputs))
        main = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 0 if main is None else 6 * defaults.multiplied_parameters(self.model) * int(main.numel())

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
        """
        if self.is_world_process_zero():
            given = card.CardFacts(
                model_name or self.output_folder.absolute().name, _listed(language), license, _listed(tags),
                finetuned_from, _listed(tasks), _listed(dataset_tags), _listed(dataset or dataset_tags),
                _listed(dataset_args),
            )  # fmt: skip
            data = self.train_dataset if self.eval_dataset is None else self.eval_dataset
            found = card.of_run(
                given, self.model, self.args.to_dict(), self.state, data, self._session.gang.size
            )
            card.write_card(self.output_folder / card.CARD, found)

    # --- the Hub ------------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository `args.hub_model_id` if it does not exist, on the main process."""
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
        """Save the model, write its card (`kwargs` are facts for it), and upload both. Collective.

        Returns:
            The address of the commit; without `blocking` its `concurrent.futures.Future`, at once. None on processes
            other than the main one, which uploads.

        Raises:
            ConfigError: the Hub refuses the name or the token, or cannot be reached. HubError: the upload failed, or
                did not end within `hub_wait`.
        """
        self.save_model(_internal_call=True)
        self._services.events.fire("on_push_begin")
        if not self.is_world_process_zero():
            return None
        handler, folder = self.callback_handler, self.output_folder
        publisher = publishing.publisher(self.args, handler, folder, token, revision)
        self.create_model_card(**publishing.card_facts(publisher, self.model, kwargs))
        commit = publishing.push(publisher, folder, commit_message or "End of training")
        if not blocking:
            return commit
        publisher.finish()
        return commit.result()

    # --- not built yet -----------------------------------------------------------------------------------------------

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not built yet: raises ConfigError with what to do instead."""
        why = METHODS_REFUSED["hyperparameter_search"]
        raise ConfigError(Problem("Trainer.hyperparameter_search", "called", why))


def _of_run(run: Run | None) -> Run:
    """Return the run. Raises ModelError if there was none."""
    if run is None:
        raise ModelError("there is no run yet: call train() first")
    return run


def _listed(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
