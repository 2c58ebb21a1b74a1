"""Names of `Trainer` that hold nothing: what another object owns, what follows from its attributes, what is refused."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from windlass.config.arguments import TrainingArguments
from windlass.config.support import SECTIONS
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.locations import local_folder
from windlass.trainer.losses import as_count, on_device
from windlass.trainer.machinery import card, defaults, optimization, planning
from windlass.trainer.reports import readable, show_metrics, write_metrics
from windlass.trainer.session import Session

if TYPE_CHECKING:
    from windlass.accelerator.accelerator import Accelerator
    from windlass.accelerator.engine import TrainerEngine
    from windlass.callbacks.handler import CallbackHandler
    from windlass.trainer.run import Run
    from windlass.trainer.services import Services


class TrainerNames:
    """The stateless base of `Trainer`. Everything here may be called, and overridden, like the rest."""

    args: TrainingArguments
    model: nn.Module
    model_init: Callable[..., nn.Module] | None
    accelerator: Accelerator
    optimizer: torch.optim.Optimizer | None
    processing_class: Any
    is_in_train: bool
    _session: Session
    _services: Services
    _engine: TrainerEngine
    _run: Run | None

    def count_targets(self, batch: Any) -> float:
        raise NotImplementedError

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        raise NotImplementedError

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        raise NotImplementedError

    # --- what another object owns -----------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        """Where the run is."""
        return self._services.events.state

    @state.setter
    def state(self, value: TrainerState) -> None:
        self._services.events.state = value

    @property
    def control(self) -> TrainerControl:
        """What callbacks asked for."""
        return self._services.events.control

    @control.setter
    def control(self, value: TrainerControl) -> None:
        self._services.events.control = value

    @property
    def callback_handler(self) -> CallbackHandler:
        """The callbacks."""
        return self._services.events.handler

    def add_callback(self, callback: Any) -> None:
        """Add a callback, by class or instance."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take a callback out, by class or instance, and return it; None where it is not there."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Take a callback out, by class or instance."""
        self.callback_handler.remove_callback(callback)

    @property
    def tokenizer(self) -> Any:
        """The earlier name of `processing_class`."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model's own loss divides by `num_items_in_batch`: by signature until it is measured."""
        return self._services.loss.divides

    @property
    def output_folder(self) -> Path:
        """Where this run's files go on this machine: a staging folder where `output_dir` is a URL."""
        return local_folder(self.args.output_path)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self._session.world.is_local_main

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of the job."""
        return self._session.world.is_main

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """What the forward and the loss run in: mixed precision."""
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
        """Save a checkpoint of the run as it is. Every rank calls it; see `Checkpointer.save`."""
        _of_run(self._run).save_checkpoint(wait=not self.is_in_train)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model. Override it to load them your own way."""
        _of_run(self._run).load_weights(Path(resume_from_checkpoint), self.model if model is None else model)

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights into the model, verified."""
        _of_run(self._run).checkpointer.load_best_model()

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Note the metrics of an evaluation; return True if it is the best so far."""
        return _of_run(self._run).best.observe(metrics)

    def end(self) -> None:
        """Close the process group: the last call of a script, after everything that needs the other processes."""
        self.accelerator.end_training()

    # --- data -------------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of training samples as a torch sampler, for overrides; by default the loader orders them."""
        return None

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """The order of evaluation samples as a torch sampler, for overrides; by default they come as they stand."""
        return None

    def num_examples(self, dataloader: Any) -> int:
        """How many samples a loader gives, all ranks together; estimated from its length where it has no dataset."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError, NotImplementedError):
            return len(dataloader) * self.args.per_device_train_batch_size * self._session.world.size

    def get_total_train_batch_size(self, args: Any = None) -> int:
        """Samples of one update: micro-batch, times accumulation, times ranks."""
        return planning.samples_of_update(args or self.args, self._session.world)

    def set_initial_training_values(
        self, args: Any, dataloader: Any
    ) -> tuple[int, int, int, float, int, int, int]:
        """What a run over this loader comes to, for scripts that ask.

        Returns:
            (epochs, updates per epoch, samples of one epoch, samples of the run, samples of one update,
            micro-batches per epoch, updates of the run)
        """
        gang, world = self._session.gang, self._session.world
        return planning.planned_lengths(args, gang, world, dataloader, self.num_examples)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], Tensor]:
        """Up to `num_batches` batches of an iterator, and the number of targets in them over all ranks. For scripts
        that call it; the engine gets its micro-batches from the loader.
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
        """The learning rate of each parameter group, as it stands."""
        return [group["lr"] for group in optimization.existing(self.optimizer).param_groups]

    def get_optimizer_group(self, param: nn.Parameter | None = None) -> Any:
        """The parameters of each group; with `param`, the one group that holds it (None where none does).

        Raises:
            ConfigError: there is no optimizer yet.
        """
        groups = optimization.existing(self.optimizer).param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(p is param for p in group["params"])), None)

    def get_num_trainable_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def _get_learning_rate(self) -> float:
        """The learning rate of the first group, as a report shows it."""
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
        """FLOPs of one forward and backward: 6 x parameters x tokens, or the model's own estimate where it has one.

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

        The arguments are facts that the run does not know itself; what it knows (settings, evaluations, sizes) is
        filled in. Tags of a card that is there already are kept.
        """
        if not self.is_world_process_zero():
            return
        config = getattr(self.model, "config", None)
        found = card.ModelCard(
            name=model_name or self.output_folder.absolute().name,
            model_class=type(self.model).__name__,
            parameters=sum(p.numel() for p in self.model.parameters()),
            base=finetuned_from or getattr(config, "_name_or_path", None) or None,
            facts={
                "language": _listed(language),
                "license": _listed(license),
                "tags": _listed(tags),
                "pipeline_tag": _listed(tasks),
                "datasets": _listed(dataset_tags),
            },
            dataset=_listed(dataset),
            dataset_args=_listed(dataset_args),
            settings=self.args.to_dict(),
            world=self._session.gang.size,
            history=self.state.log_history,
            steps=self.state.global_step,
            epochs=self.state.epoch,
        )
        card.write_card(self.output_folder / "README.md", found)

    # --- not built yet -----------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> NoReturn:
        """Not built yet.

        Raises:
            ConfigError: always, with what to do instead.
        """
        _refuse("init_hf_repo")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> NoReturn:
        """Not built yet.

        Raises:
            ConfigError: always, with what to do instead.
        """
        _refuse("push_to_hub")

    def hyperparameter_search(
        self,
        hp_space: Any = None,
        compute_objective: Any = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Any = None,
        **kwargs: Any,
    ) -> NoReturn:
        """Not built yet.

        Raises:
            ConfigError: always, with what to do instead.
        """
        _refuse("hyperparameter_search")


def _of_run(run: Run | None) -> Run:
    """The run, which these methods work on.

    Raises:
        ModelError: there was none.
    """
    if run is None:
        raise ModelError("this belongs to a run: call train() first")
    return run


def _refuse(name: str) -> NoReturn:
    raise ConfigError(Problem(f"Trainer.{name}", "called", SECTIONS["Trainer methods"][name].note))


def _listed(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
