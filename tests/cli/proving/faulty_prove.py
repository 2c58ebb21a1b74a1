"""`windlass prove` with a fault, or several proofs in turn: `python faulty_prove.py FAULT RECIPE ... -- FAULT ...`.

The processes of a trial import this file as their main module, as `multiprocessing` does, with the arguments of the
proof under way, and plant its fault. Each fault is one that has been made somewhere: only ranks of a layout come past
it. Behind what each proof prints stands a line `exit code N`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from windlass.transforms.linear_exchange import exchange, same

FAULTS: dict[str, Callable[[], None]] = {}


def fault(plant: Callable[[], None]) -> Callable[[], None]:
    FAULTS[plant.__name__] = plant
    return plant


@fault
def missing_sum_of_outputs() -> None:
    """A layer that is divided by columns of its input returns this rank's product."""
    from windlass.transforms import tensor_layers

    tensor_layers.summed = lambda part, split: exchange(part, same, same)


@fault
def missing_sum_of_input_gradients() -> None:
    """The gradient of a divided layer's input is that of this rank's outputs."""
    from windlass.transforms import tensor_layers

    tensor_layers.copied = lambda states, split: exchange(states, same, same)


@fault
def wrong_divisor() -> None:
    """Each rank divides the loss of its part of a row by the targets of that part."""
    from windlass.transforms import context

    real = context.divide

    def divide(batch: Any, *rest: Any) -> Any:
        part = real(batch, *rest)
        if "shift_labels" in part and torch.is_grad_enabled():
            part["num_items_in_batch"] = (part["shift_labels"] != -100).sum().clamp(min=1)
        return part

    context.divide = divide


@fault
def ignored_window() -> None:
    """In training, queries see keys beyond the sliding window. (Always, and the check of a short row refuses it.)"""
    from windlass.transforms import divided_sequences

    real = divided_sequences.ring_attention

    def attend(query: Any, key: Any, value: Any, sight: Any, *rest: Any) -> Any:
        window = None if torch.is_grad_enabled() else sight.window
        return real(query, key, value, dataclasses.replace(sight, window=window), *rest)

    divided_sequences.ring_attention = attend


@fault
def tie_that_drifts() -> None:
    """Embedding and head become two parameters."""
    from windlass.transforms.ddp import Replicated

    real = Replicated.__init__

    def init(self: Any, module: Any, *rest: Any, **options: Any) -> None:
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
        real(self, module, *rest, **options)

    Replicated.__init__ = init  # type: ignore[method-assign]


@fault
def gradients_over_the_wrong_gang() -> None:
    """Parts are averaged over the ranks that have other parts."""
    from windlass.transforms import tensor_parallel

    real = tensor_parallel.average_gradients

    def average(parameters: Any, total: Any, count: int) -> None:
        if parameters and tensor_parallel.is_cut(parameters[0]):
            total = total.__self__.over("tensor").sum_on_device
        real(parameters, total, count)

    tensor_parallel.average_gradients = average  # type: ignore[assignment]


@fault
def norm_of_a_shard() -> None:
    """The norm is that of this rank's parts."""
    from windlass.transforms.tensor_parallel import TensorParallel

    TensorParallel._sum_of_norm = lambda self, square: square  # type: ignore[method-assign]


@fault
def norm_per_rank() -> None:
    """Each rank clips by a norm of its own."""
    from windlass.transforms.strategy import Strategy

    real = Strategy.total_norm

    def total_norm(self: Any, gradients: Any) -> Any:
        shift = 1.0 + 0.1 * dist.get_rank() if dist.is_initialized() else 1.0
        return real(self, gradients) * shift

    Strategy.total_norm = total_norm  # type: ignore[method-assign]


@fault
def tokens_counted_twice() -> None:
    """Every rank sends the counts of the samples that it shares with others."""
    from windlass.engine.feed import Feed

    real = Feed.__init__

    def init(self: Any, *rest: Any, **options: Any) -> None:
        real(self, *rest, **options)
        self._sends_counts = True

    Feed.__init__ = init  # type: ignore[method-assign]


@fault
def positions_of_the_part() -> None:
    """Positions count from the beginning of a rank's part of a row."""
    from windlass.transforms import context

    real = context.divide

    def divide(batch: Any, *rest: Any) -> Any:
        part = real(batch, *rest)
        if torch.is_grad_enabled():
            part["position_ids"] = torch.arange(part["input_ids"].shape[1]).expand_as(part["position_ids"])
        return part

    context.divide = divide


@fault
def keys_in_the_wrong_order() -> None:
    """In training, queries meet the keys of other groups."""
    from windlass.transforms import divided_sequences

    real = divided_sequences.ring_attention

    def attend(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        if torch.is_grad_enabled():
            key, value = key.flip(1), value.flip(1)
        return real(query, key, value, *rest)

    divided_sequences.ring_attention = attend


@fault
def state_of_another_shard() -> None:
    """The optimizer of each rank has the moments of the first rank's shard."""
    from windlass.dist.sharded import is_sharded, local
    from windlass.engine.native import NativeExecutor

    real = NativeExecutor.step

    def step(self: Any) -> Any:
        applied = real(self)
        for state in self.optimizer.state.values():
            if dist.is_initialized() and is_sharded(state["exp_avg"]):
                moments = local(state["exp_avg"])
                sent = moments.clone()
                dist.broadcast(sent, 0)
                moments.copy_(sent)
        return applied

    NativeExecutor.step = step  # type: ignore[method-assign]


@fault
def dropout_is_on() -> None:
    """The ranks of a layout drop some of what a divided layer returns."""
    from windlass.transforms.tensor_layers import RowLinear

    real = RowLinear.forward

    def forward(self: Any, input: Any) -> Any:
        return torch.nn.functional.dropout(real(self, input), 0.1, self.training)

    RowLinear.forward = forward  # type: ignore[method-assign]


@fault
def doubled_balancing_loss() -> None:
    """The balancing loss of experts is added by each of the ranks that share a batch."""
    from transformers.models.mixtral import modeling_mixtral

    real: Any = modeling_mixtral.load_balancing_loss_func

    def doubled(*rest: Any) -> Any:
        return real(*rest) * (dist.get_world_size() if dist.is_initialized() else 1)

    modeling_mixtral.load_balancing_loss_func = doubled


@fault
def sum_of_parts_not_multiplied() -> None:
    """Gradients of parts are averaged where they must be added."""
    from windlass.transforms.context import DividedForwards

    DividedForwards._sum = lambda self, share: exchange(  # type: ignore[method-assign]
        share, lambda part: self._ranks.sum_on_device(part.clone()), same
    )


@fault
def average_twice() -> None:
    """Gradients of replicas are divided by their number again."""
    from windlass.engine.native import NativeExecutor

    real = NativeExecutor.clip

    def clip(self: Any, *rest: Any) -> Any:
        if dist.is_initialized():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad /= dist.get_world_size()
        return real(self, *rest)

    NativeExecutor.clip = clip  # type: ignore[method-assign]


@fault
def a_rank_dies() -> None:
    """One rank ends in the middle of a training."""
    from windlass.engine.native import NativeExecutor

    real = NativeExecutor.step

    def step(self: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == 1:
            os._exit(9)
        return real(self)

    NativeExecutor.step = step  # type: ignore[method-assign]


@fault
def a_rank_refuses() -> None:
    """One rank refuses the layout, and never meets the others, which wait for it."""
    from windlass.core.errors import ConfigError, Problem
    from windlass.trainer import session

    real = session.join

    def join(world: Any, *rest: Any, **options: Any) -> Any:
        if world.rank == 1:
            raise ConfigError(Problem("tp_size", 2, "is refused by one rank"))
        return real(world, *rest, **options)

    session.join = join


if __name__ == "__mp_main__":
    FAULTS[sys.argv[1]]()

if __name__ == "__main__":
    from windlass.cli.main import main
    from windlass.cli.proving import proving_processes

    proving_processes.LIMIT = 1e6  # no fault is found by waiting
    for between, words in groupby(sys.argv[1:], "--".__eq__):
        if not between:
            sys.argv[1:] = words
            print("exit code", main(["prove", *sys.argv[2:]]), flush=True)
