"""From a call of `train()` to a run that can be executed: checks between ranks, the checkpoint, the plan, the parts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from windlass.assemble.batch import update_size
from windlass.assemble.build import Built, build
from windlass.assemble.resolve import resolve_run
from windlass.assemble.rules import Facts
from windlass.callbacks.run_record import RunRecord
from windlass.checkpoint.foreign import ForeignCheckpoint
from windlass.checkpoint.manager import Checkpoint
from windlass.checkpoint.nodes import Disks, whole_on_one_disk
from windlass.checkpoint.optimizer_state import check_nameable, sparse_momentum
from windlass.checkpoint.restorable import check_restorable
from windlass.checkpoint.retention import Retention
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import CallPlan, DistPlan, PipelinePlan, RunPlan, SavePlan
from windlass.core.errors import CheckpointError, ConfigError, ModelError, Problem, refuse
from windlass.core.lazy import import_uncollected
from windlass.core.locations import local_folder
from windlass.core.logs import get_job_logger
from windlass.core.mesh import Axis, Mesh
from windlass.core.optional import require
from windlass.data.dealt_loader import DealtLoader
from windlass.data.loader import Loader
from windlass.data.update_batch import GroupSource
from windlass.dist.alike import check_alike, optimizer_facts
from windlass.dist.gang import Gang
from windlass.dist.lockstep import together
from windlass.proofs.record import Claim, arguments_that_matter, check_adapter, describe
from windlass.proofs.small_config import AxisLayout
from windlass.trainer.batch_fitter import MemoryNote
from windlass.trainer.column_checks import check_columns, given_datasets
from windlass.trainer.compare_ranks import check_call_alike, check_plan_alike
from windlass.trainer.continuing import ForeignPlace, find_place
from windlass.trainer.defaults import align_special_tokens, warn_of_spare_devices
from windlass.trainer.hooks import WATCHED, TrainHooks, loss_hooks, loss_settings, replaced
from windlass.trainer.instead import RunRequest
from windlass.trainer.interruption import Interruption
from windlass.trainer.loading import group_source
from windlass.trainer.model_writer import ModelWriter
from windlass.trainer.publishing import fetched
from windlass.trainer.resuming import (
    CheckpointSource,
    check_same_loader,
    resumed_progress,
    saved_position,
    saved_update_size,
    warn_if_complete,
    warn_of_changed_arguments,
)
from windlass.trainer.run import Run
from windlass.trainer.run_context import RunContext
from windlass.trainer.run_folder import RunFolder
from windlass.trainer.script_loss import check_loss_modules, check_smoothing
from windlass.trainer.services import Services
from windlass.trainer.uncalled import CLIP_ELSEWHERE
from windlass.trainer.wrappers import innermost
from windlass.transforms.strategy import Strategy

if TYPE_CHECKING:
    from windlass.trainer.trainer import Trainer

logger = get_job_logger(__name__)

# Names of the axes where layouts are written.
_NAMES: dict[Axis, str] = {
    "replicate": "dp",
    "shard": "dp_shard",
    "expert": "ep",
    "tensor": "tp",
    "context": "cp",
    "sequence": "sp",
    "pipeline": "pp",
}
_OF_SAMPLES = ("dp", "dp_shard")
_COMPILER = "torch._dynamo"


def layout_of(mesh: Mesh) -> AxisLayout:
    """The axes of a run as `windlass prove` names them."""
    return AxisLayout.of({name: mesh.along(axis) for axis, name in _NAMES.items()})


def report_proof(args: TrainingArguments, model: Any, all_ranks: Gang, dist: DistPlan) -> None:
    """Log on the main process whether the layout is proven for a model of this kind. Nothing is logged for a model that
    has no configuration of transformers, and for ranks that differ in their samples alone, unless it is proven.
    """
    if all_ranks.size == 1 or not all_ranks.world.is_main:
        return
    # Only configurations of transformers have an `attribute_map`, by which a claim makes a small one of this kind.
    layout, config = layout_of(all_ranks.mesh), getattr(model, "config", None)
    if not layout.axes or dist.strategy == "deepspeed" or not hasattr(config, "attribute_map"):
        return
    divides = any(axis not in _OF_SAMPLES for axis in layout.axes)
    sizes = ",".join(f"{axis}={size}" for axis, size in layout.sizes)
    name = str(getattr(config, "_name_or_path", ""))
    command = (
        f"windlass prove {name if name and Path(name).is_dir() else 'RECIPE_OR_CONFIG.JSON'} --layout {sizes}"
        f"{' parallel.tp_sequence_parallel=true' * dist.tensor_positions}"
    )
    try:
        adapters = getattr(model, "peft_config", {})
        pipeline = dist.pipeline or PipelinePlan(1)
        facts = arguments_that_matter(
            args,
            bool(adapters),
            dist.tensor_positions,
            (pipeline.schedule, pipeline.stages_per_rank),
            dist.shard is not None and dist.shard.recompute,
        )
        check_proven_kind(model)
        for adapter in adapters.values():
            check_adapter(adapter)
        proven, line = describe(Claim.of(config, layout, facts), layout, command)
    except ModelError as error:
        proven, line = False, f"layout {layout}: not proven equal to one process: {error}"
    if proven:
        logger.info("%s", line)
    elif divides:
        logger.warning("%s", line)


def check_proven_kind(model: Any) -> None:
    """Raise ModelError unless the model is the one that a proof makes of its configuration, which predicts tokens:
    models for other tasks have the same configuration, and losses that no proof computes.
    """
    classes = require("transformers.models.auto.modeling_auto", "name a model")
    kinds = [kind.__name__ for kind in type(innermost(model)).__mro__]
    if classes.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model.config.model_type) not in kinds:
        raise ModelError(f"only models of AutoModelForCausalLM are proven, and this one is a {kinds[0]}")


def begin_call(
    trainer: Trainer, owner: type, services: Services, stage: str, call: str, resume: Any = None
) -> None:
    """Read what a script assigned since the last call, compare it between ranks, and make the plan. Collective.

    Args:
        owner: the class whose methods are the defaults.
        stage: whose memory is measured, if the arguments ask for it.
        call: its name, for errors.
    """
    args, session = trainer.args, services.session
    if not args.skip_memory_metrics:
        session.memory.begin(stage, within=trainer.is_in_train)
    services.engine.take_model(trainer.model)
    settings, bound = loss_settings(trainer, owner), loss_hooks(trainer, owner)
    services.loss.adopt(settings, bound)
    if stage == "train":
        check_smoothing(settings.smoothing, bound.compute_loss, settings.function)
        if not settings.of_script:
            check_loss_modules(trainer.model, settings.smoothing, settings.default_count)
    if not trainer.is_in_train:  # an evaluation within training was compared with the run, and has its plan
        overridden = replaced(trainer, *WATCHED)
        check_call_alike(trainer, session.all_ranks, call, overridden, resume)
        names = trainer.label_names
        # The losses of Windlass's own trainers have the labels of their models.
        own_loss = settings.function is not None or bool(replaced(trainer, "compute_loss"))
        services.faults.begin(trainer.model, names, own_loss, trainer.train_dataset)
        if stage == "train" and settings.default_step and not settings.of_script:
            sets = given_datasets(trainer.train_dataset, trainer.eval_dataset, overridden)
            check_columns(sets, trainer.data_collator, trainer.model, names)
        services.plans.begin(trainer.optimizer)
    note = MemoryNote(
        args.per_device_train_batch_size, args.gradient_accumulation_steps, args.per_device_eval_batch_size,
        None, None
    )  # fmt: skip
    services.fitter.begin(bool(args.auto_find_batch_size), local_folder(args.output_path), note)


def prepare_run(
    request: RunRequest, interruption: Interruption, folder: RunFolder, resume: Any
) -> tuple[Run, ModelWriter, Checkpoint | None, ForeignPlace | None]:
    """Choose the checkpoint, resolve the plan, and build all parts. Nothing is trained or loaded yet. Collective.

    Returns:
        The run, the writer of its model, the checkpoint that it continues (None for a fresh run), and the position of a
        run of transformers' Trainer in this run's data.

    Raises:
        ConfigError, CheckpointError, ModelError, RankMismatchError: whatever can be known to be wrong before training.
    """
    # The arguments are a plan by now: nothing below reads anything else.
    args, services, hooks, tokenizer = request.args, request.services, request.hooks, request.tokenizer
    session, events = services.session, services.events
    services.evaluator.check_trainable(hooks.model)
    # `Run` sets the retention, which is known with the plan.
    opener = CheckpointSource(session.all_ranks, folder, folder.manager(Retention()))
    # Before the new state: if there is no such checkpoint, a script may still read that of its last run.
    checkpoint = opener.resume_point(fetched(resume, args, session.all_ranks, folder), args.resolve_path)
    if checkpoint is None:
        folder.warn_of_earlier_run()
    events.begin_run()
    session.memory.mark(_bytes_on(hooks.model, session.device))
    services.loss.begin_run()
    loader = hooks.get_train_dataloader()
    plan, source, place = plan_run(args, services, hooks, loader, checkpoint)
    align_special_tokens(hooks.model, tokenizer)
    hooks.wrap_model()
    created: tuple[Any, Any] = (None, None)

    def create(steps: int) -> tuple[Any, Any]:
        nonlocal created
        created = hooks.create_optimizer(steps)
        return created

    _import_compiler()
    built = build(hooks.model, create, plan, session.device, session.loss_ranks, request.optimizer)
    try:
        files = request.new_files(built.executor.strategy)
        _check_built(built, plan, hooks, folder.disks, files, session.all_ranks)
        context = RunContext(services, plan, built, files, interruption)
        record = RunRecord(folder.path, args, session.world.is_main, opener.needs)
        run = Run(context, source, opener, record)
    except BaseException:
        built.executor.release()
        raise
    services.engine.attach(services.loss.normaliser, built.executor)
    events.show(
        model=hooks.model, optimizer=created[0], lr_scheduler=created[1], train_dataloader=loader,
        processing_class=tokenizer
    )  # fmt: skip
    warn_of_spare_devices(session.world, session.device)
    report_proof(args, hooks.model, session.all_ranks, plan.dist)
    if checkpoint is not None:
        warn_if_complete(checkpoint, plan.duration.steps, args)
    if checkpoint is not None and not isinstance(checkpoint, ForeignCheckpoint) and session.world.is_main:
        warn_of_changed_arguments(checkpoint, args.to_dict(), built.schedule.counts_steps)
    return run, files, checkpoint, place


def _import_compiler() -> None:
    """PyTorch imports its compiler when the first optimizer of a process is made. A function that runs in that import
    keeps its frame in a cycle, and so the frames of all callers, with the model. All that the import made is still in
    the youngest generation: to collect that one frees them, in a fraction of the time that all of them would take.
    """
    if _COMPILER not in sys.modules:
        import_uncollected(_COMPILER)
        gc.collect(0)


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan_run(
    args: TrainingArguments, services: Services, hooks: TrainHooks, loader: Any, checkpoint: Checkpoint | None
) -> tuple[RunPlan, GroupSource, ForeignPlace | None]:
    """Plan a run over `loader`, from the beginning or from a checkpoint. Collective."""
    call, session = services.plans.of(args), services.session
    position = None if call.data.restart_epoch else saved_position(checkpoint)
    if checkpoint is not None and position is not None:
        check_same_loader(checkpoint, position, dealt=isinstance(loader, DealtLoader))
    source = group_source(call, session.data_ranks, loader, position)
    saved_size = None if checkpoint is None else saved_update_size(checkpoint)
    size, note = update_size(call.batches, saved_size, services.fitter.train)
    if size.asked_micro is not None and isinstance(source, Loader):
        source.resize(size.micro, size.accumulation)
    place = progress = None
    if isinstance(checkpoint, ForeignCheckpoint):
        place = find_place(checkpoint, source, size.accumulation)
        progress = place.progress(checkpoint.step)
    elif checkpoint is not None:
        progress = resumed_progress(checkpoint, source, size.accumulation, position)
    per_epoch = source.groups_per_epoch(size.accumulation)
    facts = Facts(
        per_epoch, has_evaluation_data=hooks.has_evaluation_data,
        evaluates_iterator=hooks.evaluates_iterator, overridden=hooks.overridden,
        uncalled=hooks.uncalled, absent=hooks.absent, resumed=progress, size=size, hidden_size=_width(hooks.model)
    )  # fmt: skip
    plan = resolve_run(args, call, facts)
    check_plan_alike(session.all_ranks, plan)
    if note is not None:
        get_job_logger(__name__).warning(note)
    return plan, source, place


def _bytes_on(model: nn.Module, device: torch.device) -> int:
    """The bytes of the weights and buffers of a model on a kind of device."""
    tensors = (*model.parameters(), *model.buffers())
    return sum(t.numel() * t.element_size() for t in tensors if t.device.type == device.type)


def _width(model: nn.Module) -> int | None:
    """The width that the configuration of a transformers model has; that of its text part, if it has several."""
    # By it DeepSpeed's "auto" sizes of buckets are computed.
    config = getattr(model, "config", None)
    width = getattr(config, "hidden_size", None) or getattr(
        getattr(config, "text_config", None), "hidden_size", None
    )
    return width if isinstance(width, int) else None


def planned_lengths(
    args: TrainingArguments, plan: CallPlan, data_ranks: Gang, loader: Any, count: Callable[[Any], int]
) -> tuple[int, int, int, float, int, int, int]:
    """The lengths of a run over this loader; see `Trainer.set_initial_training_values`. `count` returns the samples of
    a loader of known length.
    """
    size = plan.batches.size
    per_epoch = group_source(plan, data_ranks, loader).groups_per_epoch(size.accumulation)
    duration = resolve_run(args, plan, Facts(per_epoch)).duration
    update, steps = size.samples, duration.steps
    if per_epoch is None:
        batches = steps * size.accumulation
        return duration.epochs, steps, update * steps, update * steps, update, batches, steps
    examples = count(loader)
    seen = update * steps if args.max_steps > 0 else examples * args.num_train_epochs
    return duration.epochs, per_epoch, examples, seen, update, len(loader), steps


# --- checks of what was built -----------------------------------------------------------------------------------------


def _check_built(
    built: Built, plan: RunPlan, hooks: TrainHooks, disks: Disks, files: ModelWriter, all_ranks: Gang
) -> None:
    """Refuse, before the first update, what could not be saved or differs between ranks. Collective."""
    check_alike({"optimizer": optimizer_facts(built.executor.optimizer)}, all_ranks)
    check_optimizer(built.executor.optimizer, files.model, plan.save, all_ranks)
    if hooks.clips is not None and not built.executor.has_whole_gradients():
        raise ConfigError(Problem(hooks.clips, "overridden", CLIP_ELSEWHERE))
    _check_disks(disks, built.executor.strategy, plan.save.on_each_node)
    # A script's own way to save, and adapters, whose weights peft names, are not checked.
    if not hooks.saves_own_way and files.adapter is None:
        _check_saved_model(hooks.model, plan.save, all_ranks)


def _check_disks(disks: Disks, strategy: Strategy, on_each_node: bool) -> None:
    """Raise ConfigError if whole weights would be gathered on one process and other machines could not read them."""
    if disks.nodes == 1 or not strategy.sharded:
        return
    if on_each_node:
        fix = "sharded weights come together on the first process alone: leave it off, and copy what save_model() wrote"
        raise ConfigError(Problem("save_on_each_node", True, fix))
    if not strategy.saves_parts:
        raise whole_on_one_disk(disks, "fsdp_config.state_dict_type", "output_dir")


def check_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, plan: SavePlan, all_ranks: Gang
) -> None:
    """Raise ModelError if the optimizer updates tensors that are not the model's, and that a run would have to save, or
    whose gradients would differ between processes; ConfigError if its state could not be saved.
    """
    saves = not plan.model_only and (plan.cadence.strategy != "no" or plan.every is not None)
    if saves:
        refuse(sparse_momentum(optimizer, model))
    if not saves and all_ranks.size == 1:
        return
    try:
        check_nameable(optimizer, model)
    except CheckpointError as error:
        raise ModelError(f"this optimizer cannot train in this run: {error}") from None


def _check_saved_model(model: nn.Module, plan: SavePlan, all_ranks: Gang) -> None:
    """Raise ModelError on every rank if a model's whole weights cannot be saved or restored. Collective."""
    if plan.cadence.strategy == "no" and plan.every is None:
        return
    try:
        together(all_ranks, lambda: check_restorable(model))
    except CheckpointError as error:
        raise ModelError(f"this model cannot be resumed from a checkpoint: {error}") from None
