"""A model whose parameters are divided among the stages of a pipeline: it keeps its modules, names and forward.

A forward outside of a training step is a collective of the pipeline: one stage after the other computes, and all ranks
get the result of the last. In a training step the executor runs one stage at a time (`run`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.module_state import ElsewhereState, kept_elsewhere
from windlass.core.rng import PlacedRandomness
from windlass.dist.gang import Gang
from windlass.dist.sharded import (
    Absent,
    Blocks,
    Held,
    absent_like,
    all_holders,
    blocks_as_lists,
    blocks_of_lists,
    is_sharded,
    part,
)
from windlass.transforms.lean_head import LeanHead
from windlass.transforms.pipeline_cut import Cut
from windlass.transforms.stage_balance import StageBalance
from windlass.transforms.stage_forwards import Call, StageForwards
from windlass.transforms.stage_link import StageLink
from windlass.transforms.stage_views import StageEnd, StageView

_T = TypeVar("_T")


def staged_of(module: nn.Module) -> StagedModel | None:
    """The stages of `module`; None if its layers are not divided among ranks."""
    found = kept_elsewhere(module)
    return found if isinstance(found, StagedModel) else None


class StagedModel(ElsewhereState):
    """The stages of a model that this rank computes.

    Args:
        module: whole, on the host; its parameters of other stages are replaced, and the others moved to `device`.
        placement: for each stage the rank that computes it, as an index in the pipeline.
        pipeline_ranks: the pipeline of this rank.
        balance: of the experts in all stages.

    Attributes:
        local: the stages of this rank.
        copies: parameters of this rank that an earlier stage updates with it (tied ones), and the index of its rank.
        lent: parameters of this rank of which a later stage has a copy, and the index of its rank.
        lean_head: makes the loss of a training step without logits; None if only the model's own loss is exact.
        at_end: called with the tensor with which a forward of a training step ends before the last stage; returns it.
    """

    in_stages = True

    def __init__(
        self,
        module: nn.Module,
        cut: Cut,
        placement: Sequence[int],
        pipeline_ranks: Gang,
        device: torch.device,
        balance: StageBalance,
    ) -> None:
        self.module, self.placement, self.link = module, placement, StageLink(pipeline_ranks, device)
        self.local = [stage for stage, rank in enumerate(placement) if rank == pipeline_ranks.rank]
        self.randomness = PlacedRandomness(device)
        self.copies: dict[nn.Parameter, int] = {}
        self.lent: dict[nn.Parameter, int] = {}
        self.lean_head: LeanHead | None = None
        self.link.borders = cut.last
        self.at_end: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self._owners: dict[nn.Parameter, int] = {}
        self._values: dict[Tensor, Tensor] = {}
        self._places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
        self._of_stage: dict[int, list[nn.Parameter]] = {stage: [] for stage in self.local}
        self._stage_of = cut.stage_of()
        self._divide(cut, device)
        self._views = {stage: StageView(module, cut, stage, balance) for stage in self.local}
        self._step: tuple[int, int] | None = None  # the stage and the micro-batch of a training step
        self._calls = 0  # of the model in it
        self._forward = module.forward
        module.forward = self._new_forward()

    def _new_forward(self) -> Callable[..., Any]:
        @functools.wraps(self._forward)  # whose parameters are read: they name the columns of a batch
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run_or_share(args, kwargs)

        return forward

    @property
    def stages(self) -> int:
        """The stages of the whole pipeline."""
        return len(self.placement)

    @property
    def in_step(self) -> bool:
        """Return True while a stage runs a training step."""
        return self._step is not None

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """The parameters that a stage of this rank computes with; whole ones while they are gathered."""
        return [self._now(parameter) for parameter in self._of_stage[stage]]

    def _now(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the model has in the place of a parameter."""
        module, name = self._places[parameter]
        found = module._parameters[name]
        assert found is not None
        return found

    def room(self, stage: int) -> Tensor | None:
        """Memory for what the stage before sends; None if that failed. Waits for its header."""
        if not self.link.ranks.exists:
            return self._views[stage].balance.room(self.link.imagine(stage))
        return self.link.expect(self.placement[stage - 1])

    # --- parameters -------------------------------------------------------------------------------------------------

    def _divide(self, cut: Cut, device: torch.device) -> None:
        """Replace the parameters of other ranks, and move the rest to the device."""
        users: dict[nn.Parameter, set[int]] = {}
        modules, number = dict(self.module.named_modules()), cut.stage_of()
        # A tied parameter has users in several stages.
        for name, stage in number.items():
            for parameter in modules[name].parameters():
                users.setdefault(parameter, set()).add(stage)
        taken: dict[nn.Parameter, nn.Parameter] = {}
        for parameter, stages in users.items():
            taken[parameter] = self._take(parameter, sorted(stages), device)
        for module in self.module.modules():
            for name, old in module._parameters.items():
                if old is not None:
                    module._parameters[name] = taken[old]
                    self._places.setdefault(taken[old], (module, name))
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)

    def buffers_of_ranks(self) -> dict[int, list[Tensor]]:
        """Buffers by the index in the pipeline of the rank whose layers they are in; 0 if they are in none."""
        modules, found = dict(self.module.named_modules()), dict[int, list[Tensor]]()
        owners = {
            id(buffer): self.placement[stage]
            for name, stage in reversed(self._stage_of.items())
            for buffer in modules[name].buffers()
        }
        for buffer in self.module.buffers():
            found.setdefault(owners.get(id(buffer), 0), []).append(buffer)
        return found

    def _take(self, parameter: nn.Parameter, stages: Sequence[int], device: torch.device) -> nn.Parameter:
        ranks = list(dict.fromkeys(self.placement[stage] for stage in stages))
        me = self.link.ranks.rank
        if len(ranks) > 2:
            raise ModelError(
                f"a parameter of shape {list(parameter.shape)} is used on {len(ranks)} ranks of the pipeline, and ties "
                "are built between two: set pp_size=2 or less"
            )
        if me in ranks:
            with torch.no_grad():
                parameter.data = parameter.data.to(device).contiguous()
            mine: nn.Parameter = parameter
            for stage in set(stages) & set(self.local):
                self._of_stage[stage].append(mine)
            if len(ranks) == 2:
                (self.lent if me == ranks[0] else self.copies)[mine] = ranks[me == ranks[0]]
        else:
            mine = absent_like(parameter, device)
        self._owners[mine] = ranks[0]
        return mine

    def spread(self, spread: Callable[[], _T]) -> _T:
        """What `spread` returns, which may replace the parameters of this rank by its parts of them. Collective."""
        result = spread()
        # Sharding replaces parameters; all that is kept here by parameter follows.
        now = {parameter: self._now(parameter) for parameter in self._places}
        self.copies = {now[p]: rank for p, rank in self.copies.items()}
        self.lent = {now[p]: rank for p, rank in self.lent.items()}
        self._owners = {now[p]: rank for p, rank in self._owners.items()}
        self._of_stage = {stage: [now[p] for p in found] for stage, found in self._of_stage.items()}
        self._places = {now[p]: place for p, place in self._places.items()}
        self._values = {
            p: Held(p, None if isinstance(p, Absent) else p, blocks)
            for p, blocks in self._described().items()
        }
        return result

    def _described(self) -> dict[nn.Parameter, Blocks]:
        """The parts of each parameter, and the ranks that write them: those of the first stage that has it."""
        all_ranks, stage = self.link.ranks.over("all"), self.link.ranks.over("stage").members
        numbered = dict(enumerate(self._owners))
        mine = {
            number: all_holders(p) if is_sharded(p) else [(part(p), stage)]
            for number, p in numbered.items()
            if self._owners[p] == self.link.ranks.rank and all_ranks.rank == stage[0]
        }
        sent = [[number, blocks_as_lists(blocks)] for number, blocks in mine.items()]
        return {
            numbered[number]: blocks_of_lists(lists)
            for found in all_ranks.gather_objects(sent)
            for number, lists in found
        }

    def compute_in(self, dtype: torch.dtype) -> None:
        """Set the dtype in which units compute, if it is not that in which they did when the model was cut."""
        for view in self._views.values():
            view.compute_in(dtype)

    @property
    def values(self) -> Mapping[Tensor, Tensor]:
        """Each parameter as ranks of the job write it."""
        return self._values

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which every rank has all parameters, and computes forwards by itself. Collective."""
        # All are gathered before the first is replaced: a collective that fails leaves the model as it was.
        values = {p: value for p, value in self.whole_parameters() if isinstance(p, Absent)}
        taken: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in self.module.modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, Absent):
                    taken.append((module, name, parameter))
                    module._parameters[name] = nn.Parameter(values[parameter], requires_grad=False)
        divided, self.module.forward = self.module.forward, self._forward
        try:
            yield
        finally:
            self.module.forward = divided
            for module, name, parameter in taken:
                module._parameters[name] = parameter

    def whole_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its values, one at a time. Collective over all ranks."""
        for parameter, value in self.values.items():
            assert isinstance(parameter, nn.Parameter)
            assert isinstance(value, Held)
            yield parameter, value.whole()

    # --- a stage of a training step ---------------------------------------------------------------------------------

    def run(self, stage: int, index: int, received: Tensor | None, body: Callable[[], Tensor]) -> Tensor:
        """Run a micro-batch on a stage of this rank: `body`, which calls the model.

        Args:
            index: of the micro-batch, by which random numbers are drawn.
            received: from the stage before; None on the first.

        Returns:
            The tensor with which the stage ends; on the last stage what `body` returns.
        """
        self._step, self._calls = (stage, index), 0
        self.randomness.at(index)
        self._views[stage].enter(received)
        try:
            result = body()
        except StageEnd as end:
            result = end.tensor
        finally:
            self._views[stage].leave()
            self._step = None
        if not self._calls:
            raise ModelError(
                "the training step did not call the model, whose layers a pipeline divides among processes: call "
                "`model(**inputs)` in it once, or set pp_size=1"
            )
        return result

    def _run_or_share(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._step is None:
            return self.together([(args, kwargs)])[0]
        self._calls += 1
        if self._calls > 1:
            raise ModelError(
                "the training step calls the model twice, and a pipeline computes it once for each micro-batch: join "
                "the batches into one call, or set pp_size=1"
            )
        # Ranks that divide the rows of a batch drop different tokens.
        stage, index = self._step
        part = self.link.ranks.over("context").rank
        self.randomness.at(index, 1 + stage + part * self.stages)
        result = self._computed(stage, (args, kwargs), self.at_end)
        self.randomness.at(index, 0)
        return result

    def _computed(self, stage: int, call: Call, at_end: Callable[[Tensor], Tensor]) -> Any:
        """The forward of a stage; the last one returns."""
        balance = self._views[stage].balance
        with balance.forward():
            try:
                return self._forward(*call[0], **call[1])
            except StageEnd as end:
                # The end of a stage has no cause to show: it is not an error.
                raise StageEnd(balance.end(at_end(end.tensor), call)) from None

    # --- a forward of all stages ------------------------------------------------------------------------------------

    @torch.no_grad()
    def together(self, calls: Sequence[Call]) -> list[Any]:
        """The results of forwards with these arguments, on every rank. Collective, without gradients."""
        return StageForwards(self.link, self.placement, self._compute).run(calls)

    def _compute(self, stage: int, received: Tensor | None, call: Call) -> Any:
        self._views[stage].enter(received)
        try:
            return self._computed(stage, call, lambda tensor: tensor)
        except StageEnd as end:
            return end.tensor
        finally:
            self._views[stage].leave()
