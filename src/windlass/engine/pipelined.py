"""The executor of pipelines: the micro-batches of an update pass through the stages, in the order of a schedule of
`torch.distributed.pipelining`.

Every rank of a pipeline has the same batches, and calls the script's training step with each. The step ends at the end
of the rank's stage; on the last stage it goes on to the loss, and passes that to `backward`, which keeps it for the
schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from windlass.config.plan import PipelinePlan
from windlass.core.errors import ModelError
from windlass.core.logs import get_logger, warn_once
from windlass.core.run_clock import BACKWARD
from windlass.core.tensors import dtype_name
from windlass.data.update_batch import UpdateBatch, fill_up
from windlass.engine.executor import StepHooks, StepResult
from windlass.engine.native import NativeExecutor
from windlass.engine.schedules import build_schedule, check_schedule
from windlass.precision.scaler import Scaler
from windlass.transforms.pipeline import Pipeline
from windlass.transforms.pipeline_stage import PipelineStage

logger = get_logger(__name__)


class PipelineExecutor(NativeExecutor):
    """Runs the stages of this rank.

    Args:
        plan: of the pipeline.
    """

    def __init__(
        self,
        strategy: Pipeline,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        plan: PipelinePlan,
        scaler: Scaler | None = None,
    ) -> None:
        super().__init__(strategy, optimizer, device, scaler)
        check_schedule(plan)
        self._plan, self._pipeline, self._staged = plan, strategy, strategy.staged
        self._stages = [PipelineStage(strategy.staged, stage) for stage in strategy.staged.local]
        self._schedules: dict[int, Any] = {}
        self._loss: Tensor | None = None
        self._takes_loss = False

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Keep the loss of the micro-batch that runs on the last stage; the schedule computes its gradients."""
        if not self._takes_loss:
            raise ModelError(
                "accelerator.backward(loss) was called where no last stage of a pipeline runs: call it in the training "
                "step, after the model"
            )
        if any(options.values()):
            raise ModelError(
                f"a pipeline computes gradients in an order of its own, without options of backward: leave "
                f"{', '.join(options)} out"
            )
        scaled = self._scaler.scale(loss) if self._scaler.active else loss
        self._loss = scaled if self._loss is None else self._loss + scaled

    def has_whole_gradients(self) -> bool:
        return False  # but those of its stages

    def backward_aux(self, loss: Tensor) -> None:
        raise ModelError(
            "LossTerms(aux=...) under gradient accumulation needs separate gradients, which a pipeline does not have: "
            "put the auxiliary terms into the sum, times their weight"
        )

    def run_step(
        self, update: UpdateBatch, hooks: StepHooks, *, max_norm: float | None = None, guard: bool = False
    ) -> StepResult:
        """All micro-batches through the pipeline, then one norm and one update as on any strategy."""
        if not self.strategy.module.training:
            self.model.train()
        before = self._clock.enter(BACKWARD)
        with self._pipeline.accumulating():
            done = self._pipelined(update, hooks)
        self._pipeline.reduce()
        self._clock.enter(before)
        return super().run_step(update, done, max_norm=max_norm, guard=guard)

    def _pipelined(self, update: UpdateBatch, hooks: StepHooks) -> StepHooks:
        """Run the micro-batches; return what they gave, in place of `hooks`. Collective."""
        count = len(update.batches)
        if count not in self._schedules:
            self._schedules[count] = build_schedule(self._plan, self._stages, count)
        schedule, micro_batches = self._schedules[count]
        if micro_batches > count:
            warn_once(
                logger,
                f"{self._plan.schedule} over {self._staged.stages} stages makes {micro_batches} micro-batches of the "
                f"{count} of an update: the others have no weight, and cost time. Set gradient_accumulation_steps to a "
                f"multiple of {self._plan.size}",
            )
            # The update itself stays as it is: `run_step` replays its own micro-batches.
            update = copy(update)
            fill_up(update, micro_batches)
        shares: list[Tensor] = []
        self._staged.randomness.begin()
        for stage in self._stages:
            stage.body = partial(self._micro_step, update, hooks, shares, stage.is_last)
        try:
            # A schedule hands one target of each micro-batch to its loss; `_loss_itself` reads none.
            schedule.step(target=torch.arange(micro_batches), return_outputs=False)
        finally:
            self._loss, self._takes_loss = None, False
            for stage in self._stages:
                stage.clear_runtime_states()
        self._staged.randomness.at(micro_batches)
        return self._shared(shares[:count], count, hooks)

    def _micro_step(
        self, update: UpdateBatch, hooks: StepHooks, shares: list[Tensor], is_last: bool, index: int
    ) -> Tensor:
        """The training step on micro-batch `index`; on the last stage its loss, to run backward on."""
        self._loss, self._takes_loss = None, is_last
        shares.append(hooks.micro_step(update, index))
        self._takes_loss = False
        assert self._loss is not None, "a step without backward is an error"
        return self._loss

    def _shared(self, shares: list[Tensor], count: int, hooks: StepHooks) -> StepHooks:
        """What the last stage knows of the update, on all ranks of the pipeline. Collective."""
        ranks, last = self._staged.link.ranks, self._staged.placement[-1]
        is_last = ranks.rank == last
        factor, parts = hooks.complete() if is_last else (None, {})
        dtype = dtype_name(shares[0].dtype) if is_last else ""
        known = ranks.broadcast_object([dtype, factor is not None, list(parts)], last)
        if not is_last and not ranks.exists:
            known = ["float32", False, []]  # an imagined rank knows nothing else
        kind, has_factor, names = getattr(torch, known[0]), known[1], known[2]
        device = self._staged.link.device
        # The shares, the parts and the factor in one broadcast, which costs more than its few numbers.
        numbers = torch.zeros(count + len(names) + 1, dtype=torch.float64, device=device)
        if is_last:
            given = [*shares, *parts.values(), *([] if factor is None else [factor])]
            numbers[: len(given)] = torch.stack([value.detach().to(numbers) for value in given])
        torch.distributed.broadcast(numbers, ranks.members[last], group=ranks.device_group)
        found = numbers.to(kind)
        return _Replayed(
            hooks,
            list(found[:count]),
            numbers[-1] if has_factor else None,
            dict(zip(names, found[count : count + len(names)], strict=True)),
        )


class _Replayed(StepHooks):
    """An update whose micro-batches have run."""

    def __init__(
        self, hooks: StepHooks, shares: Sequence[Tensor], factor: Tensor | None, parts: dict[str, Tensor]
    ) -> None:
        self._hooks, self._shares, self._factor, self._parts = hooks, shares, factor, parts
        self.heard = hooks.heard

    def micro_step(self, update: UpdateBatch, index: int) -> Tensor:
        return self._shares[index]

    def complete(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        return self._factor, self._parts

    def event(self, name: str) -> None:
        self._hooks.event(name)

    def stepped(self, applied: bool) -> None:
        self._hooks.stepped(applied)
