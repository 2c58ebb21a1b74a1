"""One update of a run on tensors without memory: the run's own plan, transforms, strategy, loss and optimizer."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.assemble.build import Built, build
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import RunPlan
from windlass.core.attributes import attributes_of
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.tensors import count_elements
from windlass.core.trees import map_leaves, tensors_in
from windlass.data.update_batch import UpdateBatch
from windlass.engine.splitting import Kind
from windlass.forecast.devices import few_chunks, finite_gradients, kernels_of_devices, uncompiled
from windlass.forecast.fake_weights import known_values, take_memory, with_values
from windlass.forecast.meter import (
    AVERAGE,
    BATCH,
    BUCKETS,
    BUFFERS,
    GRADIENTS,
    STATE,
    WEIGHTS,
    Meter,
    answer_of,
    inner_parts,
)
from windlass.forecast.places import ModulePlaces
from windlass.forecast.size import Size, held_by_updates, sizes_of_save
from windlass.forecast.stack import find_stack
from windlass.forecast.trace import Trace
from windlass.metrics.predictions import key_of
from windlass.metrics.tokens import InputCounter, rows
from windlass.trainer.batch_faults import Fed
from windlass.trainer.defaults import align_special_tokens
from windlass.trainer.drawn_samples import DrawnSamples
from windlass.trainer.hooks import TrainHooks
from windlass.trainer.instead import RunRequest
from windlass.trainer.interruption import Interruption
from windlass.trainer.losses import call_model
from windlass.trainer.micro_steps import MicroSteps
from windlass.trainer.preparation import check_optimizer, plan_run
from windlass.trainer.run_context import RunContext
from windlass.transforms.blocks import repeated_blocks
from windlass.transforms.lean_head import LeanHead
from windlass.transforms.pipeline import lean_head_of_whole
from windlass.transforms.staged_model import staged_of
from windlass.transforms.tensor_split import split_of

# What a run measures on its first batch, and values would have to show: see `trainer/loss_policy.py`.
_MEASURED = {"over": Kind.TARGETS.name, "shifted": True, "without_logits": True}
_READ = 64
"""Micro-batches that are read to find the largest one."""


class SomeValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers code that reads a value of a tensor without memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        answer = answer_of(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if answer is None else answer


def _some_values() -> SomeValues:
    return SomeValues()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _on_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Within the body, tensors without memory are computed with, of which PyTorch warns."""
    with warnings.catch_warnings(action="ignore"), uncompiled(), mode, _some_values(), known_values():
        yield


class Rehearsal:
    """The parts of a run whose weights have no memory.

    Args:
        request: what the run was to be made of.
        on_device: it is planned for a device, not for the process.
        whole: run all that repeats.

    Attributes:
        update: with the largest of the first micro-batches.
        stack: layers of the model of which it may be run with fewer; None: it is run as it is.
    """

    def __init__(self, request: RunRequest, mode: FakeTensorMode, *, on_device: bool, whole: bool) -> None:
        self._request, self._mode, self._on_device, self._whole = request, mode, on_device, whole
        services, hooks = request.services, request.hooks
        services.evaluator.check_trainable(hooks.model)
        services.loss.begin_run(dict(_MEASURED))
        loader = hooks.get_train_dataloader()
        self._plan, self._source, _ = plan_run(request.args, services, hooks, loader, None)
        _refuse_unbuilt(self._plan, request.args, on_device)
        pipelined = self._plan.dist.pipeline is not None
        # The stages of a pipeline divide the layers, so that all are run.
        self.stack = None if whole or pipelined else find_stack(hooks.model)
        # Three: the first micro-batch, the last, and one that counts for all between them.
        self.update = self._read(self._plan.batch.accumulation if pipelined else 3)

    def _read(self, at_most: int) -> UpdateBatch:
        """The update with the largest of the first micro-batches, as often as an update has them."""
        accumulation = self._plan.batch.accumulation
        batches = (batch for group in self._source.groups(accumulation) for batch in group.batches)
        read = list(itertools.islice(batches, _READ))
        if (draw := self._request.hooks.loss.draw) is not None:
            drawn = UpdateBatch(read, [[]] * len(read), 0, 0, False)
            DrawnSamples(draw, lambda own: own)(drawn)
            read = drawn.batches
        self._first, largest = read[0], max(read, key=_elements)
        # A table has no row for what the model lacks, and tensors without memory have no values that would show it.
        for batch in (self._first, largest):
            self._request.services.faults.check(Fed("training", batch))
        self._request.services.faults.warn_of_length(Fed("training", largest))
        number = min(accumulation, at_most)
        return UpdateBatch([largest] * number, [[]] * number, 0, 0, False)

    @property
    def size(self) -> Size:
        """What an estimate of its cost needs to know of the run."""
        model, plan = self._request.hooks.model, self._plan
        parameters = list(model.parameters())
        sizes = [(p.numel(), p.numel() * p.element_size(), p.requires_grad) for p in parameters]
        half = plan.precision.compute != "fp32" or parameters[0].element_size() < 4
        return Size(
            sum(number for number, _, _ in sizes),
            sum(nbytes for _, nbytes, _ in sizes),
            sum(nbytes for _, nbytes, trained in sizes if trained),
            max(len(list(repeated_blocks(model))), 1),
            self._positions(self.update.batches[0]),
            plan.batch.accumulation,
            2 if half else 4,
            sum(nbytes for _, nbytes, _ in sizes) + self._of_updates,
        )

    @property
    def _of_updates(self) -> int:
        if self._plan.optimizer.in_backward:  # it frees gradients there
            return 0
        create, steps = self._request.hooks.create_optimizer, self._plan.duration.steps

        def ready() -> torch.optim.Optimizer:
            take_memory(self._request.hooks.model, self._mode)
            found, _ = create(steps)
            assert found is not None, "a run refuses to train without one"
            return found

        return held_by_updates(self._request.hooks.model, ready, lambda: _on_fakes(self._mode))

    def build(self, layers: int | None = None) -> Built:
        """Make what the run trains with, of so many layers of the stack; None: of all. Raises what the run would."""
        request, mode = self._request, self._mode
        model, services = request.hooks.model, request.services
        if self.stack is not None and layers is not None:
            self.stack.cut(layers)
        borders, lean_head = self._borders(), self._lean_head()
        # PyTorch warns of what is done with such tensors.
        with _some_values(), warnings.catch_warnings(action="ignore"), _own_parts_only():
            take_memory(model, mode)
            align_special_tokens(model, request.tokenizer)
            built = build(
                model,
                request.hooks.create_optimizer,
                _without_tf32(self._plan),
                services.session.device,
                services.session.loss_ranks,
                request.optimizer,
            )
        check_optimizer(built.executor.optimizer, model, self._plan.save, services.session.all_ranks)
        services.engine.attach(services.loss.normaliser, built.executor)
        if (staged := staged_of(model)) is not None:
            staged.link.arriving, staged.lean_head = borders, lean_head
        return built

    def run(self, layers: int | None = None) -> Trace:
        """Run two updates with so many layers of the stack; None: with all."""
        request, mode, built = self._request, self._mode, self.build(layers)
        model, services = request.hooks.model, request.services
        places = ModulePlaces(model)
        part = (lambda name: "") if self.stack is None else self.stack.part
        meter = Meter(places, part, _vocabulary(model))
        context = RunContext(
            services,
            self._plan,
            built,
            request.new_files(built.executor.strategy),
            Interruption(services.session, self._plan.preemption),
        )
        _adopt_model(meter, model)
        for bucket in getattr(built.executor.strategy, "buckets", ()):
            meter.adopt(bucket, BUCKETS, "")
        steps = FollowedSteps(context, request.hooks, meter)
        chunks = few_chunks(meter, on_device=self._on_device, every=self._whole)
        with _on_fakes(mode):
            steps.begin(self._fakes(self.update.batches[0]), len(self.update.batches))
        updates = [self._fake(), self._fake()]
        with (
            warnings.catch_warnings(action="ignore"),
            uncompiled(),
            mode,
            known_values(),
            meter,
            meter.resizing(),
            _gathering(meter),
            places.followed(),
            torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda tensor: tensor),
            chunks,
            kernels_of_devices(self._on_device),
            finite_gradients(),
        ):
            self._updates(meter, context, steps, updates)
        return Trace(
            meter.peaks,
            meter.work,
            meter.sent,
            sizes_of_save(model, built.executor.optimizer, services.events.average(), self._plan.save),
            self._facts(model),
        )

    def _borders(self) -> dict[str, Tensor]:
        """For a pipeline, what each module returns for a micro-batch: where stages meet, another rank sends that."""
        request = self._request
        if self._plan.dist.pipeline is None or request.services.session.all_ranks.over("pipeline").rank == 0:
            return {}
        model, hooks = request.hooks.model, request.hooks.loss
        found: dict[str, Tensor] = {}

        def looked_at(name: str) -> Callable[..., None]:
            def look(module: nn.Module, inputs: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) and output else output
                if isinstance(first, Tensor):
                    found[name] = first

            return look

        handles = [each.register_forward_hook(looked_at(name)) for name, each in model.named_modules()]
        try:
            with _on_fakes(self._mode), torch.no_grad():
                take_memory(model, self._mode)
                with hooks.autocast():
                    call_model(model, hooks.prepare_inputs(self._fakes(self.update.batches[0])))
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _lean_head(self) -> LeanHead | None:
        """For a pipeline, what makes the loss without logits: a run measures it on values before the model is cut."""
        if self._plan.dist.pipeline is None:
            return None
        model = self._request.hooks.model
        with _on_fakes(self._mode):
            take_memory(model, self._mode)
            return lean_head_of_whole(model)

    def _updates(
        self, meter: Meter, context: RunContext, steps: FollowedSteps, updates: list[UpdateBatch]
    ) -> None:
        """Run a first update, which makes the optimizer's state, and a second one, which is counted."""
        plan, executor = self._plan, context.built.executor
        model, loss = context.files.model, context.services.loss
        loss.normaliser.watchers = (*loss.normaliser.watchers, lambda _: meter.keep_all())
        marks = [
            parameter.register_post_accumulate_grad_hook(partial(_adopt_gradient, meter, name))  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        guard = plan.stability.nonfinite != "raise"
        for number in range(len(updates)):
            update = updates.pop()  # so that the batches of the first are freed
            for batch in update.batches:
                for tensor in tensors_in(batch):
                    meter.adopt(tensor, BATCH, "")
            if number:
                meter.begin_again()
            executor.run_step(update, steps, max_norm=plan.stability.max_grad_norm, guard=guard)
            if number == 0:
                _adopt_state(meter, model, context.built)
                if (average := context.events.average()) is not None:
                    with meter.as_kind(AVERAGE):
                        average.begin(model)
                        average.take()
        for mark in marks:
            mark.remove()

    def _fake(self) -> UpdateBatch:
        real = self.update
        targets = [self._request.hooks.loss.count_targets(batch) for batch in real.batches]
        samples = [rows(batch) for batch in real.batches]
        batches = [self._fakes(batch) for batch in real.batches]
        return replace(
            real,
            batches=batches,
            targets=targets,
            samples=samples,
            denominator=max(sum(targets), 1.0),
            total_samples=float(sum(samples)),
        )

    def _fakes(self, batch: Any) -> Any:
        return map_leaves(lambda tensor: with_values(tensor, self._mode), batch)

    def _positions(self, batch: Any) -> int:
        """As a run counts them; of a batch without the model's main input, the elements of its largest tensor."""
        main_input = getattr(self._request.hooks.model, "main_input_name", "input_ids")
        _, positions = InputCounter(main_input)(batch)
        return positions or _elements(batch)

    def _facts(self, model: nn.Module) -> dict[str, Any]:
        plan, batch, services = self._plan, self.update.batches[0], self._request.services
        return {
            "parameters": count_elements(model.parameters()),
            "model": type(model).__name__,
            "samples": rows(batch),
            "positions": self._positions(batch),
            "accumulation": plan.batch.accumulation,
            "steps": plan.duration.steps,
            "mesh": asdict(plan.dist.mesh(self._request.services.session.world.size)),
            "tf32": bool(plan.precision.tf32),
            "copies": plan.save.background
            and (plan.save.cadence.strategy != "no" or plan.save.every is not None),
            "key": key_of(
                model,
                plan,
                services.session.all_ranks.mesh,
                self._first,
                averages=services.events.average() is not None,
                on_device=self._on_device,
            ),
            "family": getattr(getattr(model, "config", None), "model_type", type(model).__name__),
            "layers": None if self.stack is None else [self.stack.name, self.stack.length],
            "stages": None if (staged := staged_of(model)) is None else staged.local,
        }


def _without_tf32(plan: RunPlan) -> RunPlan:
    """The plan for a CPU, which has no such products; their rate is chosen by the original one."""
    return replace(plan, precision=replace(plan.precision, tf32=None))


class FollowedSteps(MicroSteps):
    """Micro-batches of a run, which name the stage of the update for a meter."""

    def __init__(self, context: RunContext, hooks: TrainHooks, meter: Meter) -> None:
        super().__init__(context, hooks)
        self._meter, self._accumulated = meter, context.plan.batch.accumulation
        self._model = context.files.model
        self.heard = ("on_pre_optimizer_step",)

    def micro_step(self, update: UpdateBatch, index: int) -> Tensor:
        self._meter.stage = "micro-batch" if index == 0 else "later micro-batch"
        # Of an update with more than three micro-batches, those in the middle are alike.
        is_middle = 0 < index < len(update.batches) - 1
        self._meter.times = self._accumulated - len(update.batches) + 1 if is_middle else 1
        share = super().micro_step(update, index)
        self._meter.times = 1
        return share

    def complete(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        self._meter.stage = "gradient norm"
        for name, parameter in self._model.named_parameters():
            _adopt_gradient(self._meter, name, parameter)  # that of a shard, which no hook has seen
        return super().complete()

    def event(self, name: str) -> None:
        if name == "on_pre_optimizer_step":
            self._meter.stage = "optimizer step"


def _adopt_gradient(meter: Meter, name: str, parameter: Tensor) -> None:
    """Name a gradient once it is complete."""
    if parameter.grad is not None:
        meter.adopt(parameter.grad, GRADIENTS, name.rpartition(".")[0])


def _refuse_unbuilt(plan: RunPlan, args: TrainingArguments, on_device: bool) -> None:
    """Raise ConfigError for runs that other code executes, and those that move memory between a device and the host."""
    if plan.dist.zero is not None:
        fix = "DeepSpeed's engine needs memory, so a plan of it is not built; plan the run with fsdp=True"
        raise ConfigError(Problem("deepspeed", "given", fix))
    shard, options = plan.dist.shard, plan.transforms.recompute_options
    on_host = {
        "fsdp.cpu_offload": shard is not None and shard.cpu_offload,
        "fsdp.activation_checkpointing_offload": shard is not None and shard.recompute_offload,
        "activation_checkpointing_kwargs.offload": plan.transforms.recompute
        and options.get("offload", False),
        "activation_offloading": getattr(args, "activation_offloading", False),
    }
    fix = "keeps memory on the host, which a plan for a device does not follow: without it, it is planned at most"
    refuse(Problem(name, True, fix) for name, is_set in on_host.items() if is_set and on_device)


def _elements(batch: Any) -> int:
    """Elements of the largest tensor of a batch."""
    return max((tensor.numel() for tensor in tensors_in(batch)), default=0)


def _vocabulary(model: nn.Module) -> int:
    """The entries of the vocabulary for which this rank makes logits."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    if weight is None:
        return 0
    # A head that is sharded is gathered before it is used; one that tensor ranks divide is not.
    split = split_of(head)
    return int(weight.shape[0]) if split is None else len(split.mine)


def _adopt_model(meter: Meter, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        meter.adopt(parameter.detach() if parameter.is_leaf else parameter, WEIGHTS, name.rpartition(".")[0])
    for name, buffer in model.named_buffers():
        meter.adopt(buffer, BUFFERS, name.rpartition(".")[0])


def _adopt_state(meter: Meter, model: nn.Module, built: Built) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, state in built.executor.optimizer.state.items():
        place = names.get(id(parameter), "").rpartition(".")[0]
        for value in state.values() if isinstance(state, Mapping) else ():
            for part in inner_parts(value) if isinstance(value, Tensor) else ():
                meter.adopt(part, STATE, place)


class _PartsOnDemand(Sequence[Tensor]):
    """What `torch.chunk` makes of a tensor, and empty parts up to `parts`, each of them once it is asked for."""

    def __init__(self, tensor: Tensor, parts: int, dim: int) -> None:
        self._tensor, self._parts, self._dim = tensor, parts, dim

    def __len__(self) -> int:
        return self._parts

    def __getitem__(self, index: Any) -> Any:
        size = self._tensor.size(self._dim)
        each = -(-size // self._parts)
        if index * each >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, index * each, min(each, size - index * each))


def _own_parts_only() -> contextlib.AbstractContextManager[None]:
    """Within the body, FSDP2 makes of each parameter the part of this rank, and not those of a thousand ranks."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return attributes_of(_fsdp_param, _chunk_with_empty=_PartsOnDemand)


def _gathering(meter: Meter) -> contextlib.AbstractContextManager[None]:
    """Within the body, memory of FSDP2's gathered weights and reductions is known as such."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    names = ("unshard", "wait_for_unshard", "post_backward")

    def followed(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with meter.as_kind(BUCKETS):
                return method(*args, **kwargs)

        return call

    return attributes_of(FSDPParamGroup, **{name: followed(getattr(FSDPParamGroup, name)) for name in names})
