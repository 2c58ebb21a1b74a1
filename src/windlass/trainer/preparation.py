"""From a call of `train()` to a run that can be executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from windlass.assemble.build import Built, build
from windlass.assemble.facts import Facts
from windlass.checkpoint.foreign import ForeignCheckpoint
from windlass.checkpoint.manager import Checkpoint
from windlass.checkpoint.restorable import check_restorable
from windlass.checkpoint.retention import Retention
from windlass.config.plan import RunPlan, SavePlan
from windlass.core.clock import Moment
from windlass.core.errors import CheckpointError, ModelError
from windlass.core.locations import local_folder
from windlass.core.types import TrainOutput
from windlass.dist.gang import Gang
from windlass.metrics.memory import reset_device_peak
from windlass.trainer.compare_ranks import Compared, check_call_alike, check_optimizer_alike
from windlass.trainer.continuing import ForeignPlace
from windlass.trainer.defaults import (
    agree_on_output,
    align_special_tokens,
    check_disks,
    warn_of_spare_devices,
)
from windlass.trainer.hooks import WATCHED, Overridable, TrainHooks, loss_hooks, overrides
from windlass.trainer.interruption import Interruption
from windlass.trainer.memory_note import MemoryNote
from windlass.trainer.model_writer import ModelWriter
from windlass.trainer.planning import plan_run
from windlass.trainer.resuming import CheckpointSource, warn_of_changed_arguments
from windlass.trainer.run import Run
from windlass.trainer.run_folder import RunFolder
from windlass.trainer.services import Services
from windlass.transforms.strategy import Strategy


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run, and what it continues.

    Attributes:
        checkpoint: None for a fresh run.
        place: where a run of transformers' Trainer is in this run's data.
    """

    run: Run
    files: ModelWriter
    checkpoint: Checkpoint | None
    place: ForeignPlace | None

    def execute(self, started: Moment) -> TrainOutput:
        return self.run.execute(started, self.checkpoint, self.place)


class Trained(Compared, Overridable, Protocol):
    """What a call takes over from a Trainer."""


def begin_call(trainer: Trained, owner: type, services: Services, call: str, resume: Any = None) -> None:
    """Take over what a script assigned since the last call, and compare it between ranks. Collective.

    Args:
        owner: the class whose methods are the defaults.
        call: its name, for errors.
        resume: `resume_from_checkpoint`.
    """
    args, session = trainer.args, services.session
    if not args.skip_memory_metrics:
        reset_device_peak(session.device)
    services.loss.adopt(loss_hooks(trainer, owner))
    if not trainer.is_in_train:  # an evaluation in the course of training was compared with the run
        check_call_alike(trainer, session.gang, call, overrides(trainer, owner, *WATCHED), resume)
    note = MemoryNote(
        args.per_device_train_batch_size, args.gradient_accumulation_steps, args.per_device_eval_batch_size,
        None, None,
    )  # fmt: skip
    services.fitter.begin(bool(args.auto_find_batch_size), local_folder(args.output_path), note)


def prepare_run(
    args: Any, services: Services, hooks: TrainHooks, interruption: Interruption, folder: RunFolder, resume: Any, *,
    optimizer: torch.optim.Optimizer | None, tokenizer: Any, new_files: Callable[[Strategy], ModelWriter],
) -> PreparedRun:  # fmt: skip
    """Choose the checkpoint, resolve the plan, and build everything. Nothing is trained or loaded yet. Collective.

    Args:
        args: the arguments; here they become a plan, which is all that anything below reads.
        resume: `resume_from_checkpoint`.
        optimizer: one that the script made before.
        tokenizer: whose special tokens the model's configuration takes.
        new_files: for the model as it is spread.

    Raises:
        ConfigError, CheckpointError, ModelError, RankMismatchError: whatever can be known to be wrong before training.
    """
    session, events = services.session, services.events
    manager = folder.manager(Retention())
    checkpoint = CheckpointSource(session, folder, manager).resume_point(resume, args.resolve_path)
    agree_on_output(session.gang, args.output_path, resuming=checkpoint is not None)
    events.begin_run()
    services.loss.begin_run()
    loader = hooks.get_train_dataloader()
    facts = Facts(
        session.world, None, has_training_data=True, has_evaluation_data=hooks.has_evaluation_data,
        overridden=hooks.overridden, fits=services.fitter.train,
    )  # fmt: skip
    planned = plan_run(args, session.gang, facts, loader, checkpoint)
    align_special_tokens(hooks.model, tokenizer)
    created: tuple[Any, Any] = (None, None)

    def create(steps: int) -> tuple[Any, Any]:
        nonlocal created
        created = hooks.create_optimizer(steps)
        return created

    built = build(hooks.model, create, planned.plan, session.device, session.gang, optimizer)
    try:
        files = new_files(built.executor.strategy)
        _check_built(built, planned.plan, hooks, folder, files, services)
        run = Run(
            services, interruption, hooks, planned.plan, planned.size, planned.source, built, folder, manager,
            files, services.accelerator.registered_objects, getattr(tokenizer, "pad_token_id", None),
        )  # fmt: skip
    except BaseException:
        built.executor.release()
        raise
    services.engine.attach(run.steps.backward, built.executor.strategy)
    events.show(
        model=hooks.model, optimizer=created[0], lr_scheduler=created[1], train_dataloader=loader,
        processing_class=tokenizer,
    )  # fmt: skip
    warn_of_spare_devices(session.world, session.device)
    if checkpoint is not None and not isinstance(checkpoint, ForeignCheckpoint) and session.world.is_main:
        warn_of_changed_arguments(checkpoint, args.to_dict())
    return PreparedRun(run, files, checkpoint, planned.place)


def _check_built(
    built: Built, plan: RunPlan, hooks: TrainHooks, folder: RunFolder, files: ModelWriter, services: Services
) -> None:
    """Refuse, before the first update, what could not be saved or differs between ranks. Collective."""
    gang = services.session.gang
    check_optimizer_alike(gang, built.executor.optimizer)
    check_disks(folder.disks, built.executor.strategy, plan.save.on_each_node)
    # What a script saves its own way, and adapters, which peft names, are not looked at.
    if not hooks.saves_own_way and files.adapter is None:
        _check_saved_model(hooks.model, plan.save, gang)


def _check_saved_model(model: nn.Module, plan: SavePlan, gang: Gang) -> None:
    """Check a model of which whole weights will be saved. Every rank calls it.

    Raises:
        ModelError: its state cannot be saved, or does not come back; on every rank.
    """
    if plan.cadence.strategy == "no" and plan.every is None:
        return
    problem = None
    try:
        check_restorable(model)
    except CheckpointError as error:
        problem = str(error)
    found = [told for told in gang.gather_objects(problem) if told is not None]
    if found:
        raise ModelError(f"this model cannot be resumed from a checkpoint: {found[0]}")
