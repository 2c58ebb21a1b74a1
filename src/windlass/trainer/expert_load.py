"""How evenly the experts of a mixture are used, and its balancing loss, for the log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.types import State
from windlass.transforms.expert_plan import expert_layers, number_of_experts
from windlass.transforms.lean_head import output_of
from windlass.transforms.staged_model import staged_of


class ExpertLoad:
    """Counts, on the device, how many tokens each expert gets in the training forwards of a model; nothing waits for
    the device between two reports. Without layers of experts it does nothing.

    Padding is not counted, if the forward gets an `attention_mask` of its tokens. Its state is saved with each rank's
    part of a checkpoint.

    Args:
        model: the bare model.
        sum_over_ranks: returns the sum of a host tensor over all ranks. Collective.
        counts: False if another rank counts the same tokens.
        is_filling: returns True if the batch of a forward has no weight.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        sum_over_ranks: Callable[[Tensor], Tensor],
        counts: bool,
        is_filling: Callable[[], bool],
    ) -> None:
        self._model, self._sum, self._counts, self._is_filling = model, sum_over_ranks, counts, is_filling
        self.layers = expert_layers(model)
        sizes = [number_of_experts(layer) for layer in self.layers]
        self._mask: Tensor | None = None
        self._counting, self._staged = False, staged_of(model)
        # One row a layer; those of the update that is being computed, and since the last report.
        self._update = torch.zeros(len(sizes), max(sizes, default=0), dtype=torch.int64, device=device)
        self._tokens, self._sizes = self._update.clone(), sizes
        # MPS has no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        # The balancing losses of batches, and their number.
        self._update_balance = torch.zeros(2, dtype=dtype, device=device)
        self._balance = self._update_balance.clone()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Within the body, training forwards are counted."""
        if not self.layers:
            yield
            return
        hooks = [
            self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
            # Also after a forward that raised: what it set must not be that of the next one.
            self._model.register_forward_hook(self._end, always_call=True),
            *(
                layer.register_forward_pre_hook(self._counter(row), with_kwargs=True)
                for row, layer in enumerate(self.layers)
            ),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Measurements and generation make no gradients; recomputation in the backward is outside of this forward.
        self._counting = module.training and torch.is_grad_enabled() and not self._is_filling()
        divided = kwargs.get("divided")  # a part of the rows
        self._mask = kwargs.get("attention_mask") if divided is None else divided.real

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        loss = None if output is None else output_of(output, "aux_loss")
        loss = output_of(output, "auxiliary") if loss is None and output is not None else loss
        if self._counting and isinstance(loss, Tensor):
            self._update_balance += torch.stack([loss.detach(), torch.ones_like(loss)]).to(self._balance)
        self._counting, self._mask = False, None

    def _counter(self, row: int) -> Callable[[nn.Module, Any, Any], None]:
        def count(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            # The forward of a stage ends without its end; layers may be computed again in the backward.
            if not self._counting or not (self._staged is None or self._staged.in_step):
                return
            given = (*args, *kwargs.values())
            # What the router chose is the one tensor of whole numbers that a layer of experts is given.
            chosen = next(t for t in given if isinstance(t, Tensor) and t.dtype == torch.int64)
            ones = torch.ones_like(chosen)
            if isinstance(self._mask, Tensor) and self._mask.numel() == len(chosen):
                ones = ones * (self._mask != 0).reshape(-1, 1)  # a mask may be of floats
            self._update[row].scatter_add_(0, chosen.flatten(), ones.flatten())

        return count

    def end_update(self) -> None:
        """Keep what was counted since the last update."""
        if self._counts:
            self._tokens += self._update
            self._balance += self._update_balance
        self.start_over()

    def start_over(self) -> None:
        """Forget what was counted since the last update."""
        self._update.zero_()
        self._update_balance.zero_()

    def read(self) -> dict[str, float]:
        """The figures over all ranks since the last call. Collective. Empty if there are no experts, or no tokens.

        Returns:
            expert_load: tokens of the busiest expert of a layer, divided by those of an average one, a mean over
            layers; expert_load_max: that of the layer in which it is largest; experts_unused: the share of experts
            without a token; aux_loss: the mean balancing loss of a micro-batch, if the model returns one.
        """
        if not self.layers:
            return {}
        own = torch.cat([self._tokens.cpu().double().flatten(), self._balance.cpu().double()])
        sums = self._sum(own)
        self._tokens.zero_()
        self._balance.zero_()
        tokens, (loss, batches) = sums[:-2].view_as(self._tokens), sums[-2:].tolist()
        used = [row[:size] for row, size in zip(tokens, self._sizes, strict=True) if row.any()]
        if not used:
            return {}
        ratios = [float(row.max() / row.mean()) for row in used]
        figures = {
            "expert_load": sum(ratios) / len(ratios),
            "expert_load_max": max(ratios),
            "experts_unused": sum(int((row == 0).sum()) for row in used) / sum(map(len, used)),
        }
        return {**figures, "aux_loss": loss / batches} if batches else figures

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        return {"tokens": self._tokens.clone(), "balance": self._balance.clone()}

    def load_state_dict(self, state: State) -> None:
        self.adopt([state])

    def adopt(self, states: list[State]) -> None:
        """Continue with the sums of `states`; those of a model with other experts are dropped."""
        self.start_over()
        self._tokens.zero_()
        self._balance.zero_()
        for state in states:
            if state["tokens"].shape == self._tokens.shape:
                self._tokens += state["tokens"].to(self._tokens)
                self._balance += state["balance"].to(self._balance)
