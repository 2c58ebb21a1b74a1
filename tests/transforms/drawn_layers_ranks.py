"""Run on several ranks: drawn models whose layers tensor ranks divide, or the stages of a pipeline, train as in one
process, in float64.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.transforms.drawn_spread_ranks import CLOSE, CPU, Net, loss_sum
from torch import Tensor, nn

from windlass.config.plan import DistPlan, PipelinePlan, ShardPlan
from windlass.core.errors import ConfigError
from windlass.core.mesh import Mesh
from windlass.core.world import world_from_environment
from windlass.data.update_batch import UpdateBatch
from windlass.dist.gang import Gang, join, leave
from windlass.dist.sharded import is_sharded, local, present
from windlass.engine.executor import StepHooks
from windlass.engine.pipelined import PipelineExecutor
from windlass.transforms.pipeline import Pipeline
from windlass.transforms.strategies import spread
from windlass.transforms.strategy import Strategy

RATE = 0.1
PLAN = {
    "embed": "embedding_rowwise", "head": "colwise_gather_output", "blocks.*.up": "colwise", "blocks.*.gate": "colwise",
    "blocks.*.down": "rowwise", "blocks.*.full": "colwise_gather_output", "blocks.*.split": "rowwise_split_input",
}  # fmt: skip
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "LoopedBFS")
Micros = list[list[Tensor]]


class Divided(nn.Module):
    """A block with a layer of each style of a plan; of some the size is not a multiple of the ranks."""

    def __init__(self, rng: random.Random, width: int, inner: int) -> None:
        super().__init__()
        sizes = {
            "gate": (width, inner), "up": (width, inner), "down": (inner, width), "full": (width, rng.randint(4, 9)),
            "wide": (width, inner), "split": (inner, width),
        }  # fmt: skip
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, nn.Linear(inputs, outputs, bias=rng.random() < 0.5))
        self.norm, self.back = nn.LayerNorm(width), nn.Linear(sizes["full"][1], width)

    def forward(self, x: Tensor) -> Tensor:
        states = self.norm(x)
        x = x + self.down(self.up(states) * torch.tanh(self.gate(states)))
        x = x + self.back(torch.tanh(self.full(x)))
        return x + self.split(torch.tanh(self.wide(x)))


def divided_net(rng: random.Random, ranks: int) -> Net:
    """A `Net` of such blocks."""
    model, width = Net(rng), rng.randint(1, 4) * ranks
    words = rng.randint(2 * ranks, 17)
    model.embed = nn.Embedding(words, width, padding_idx=rng.choice((None, 0, 3)))
    model.blocks = nn.ModuleList(
        Divided(rng, width, rng.randint(1, 4) * ranks) for _ in range(rng.randint(1, 2))
    )
    model.head = nn.Linear(width, words, bias=rng.random() < 0.5)
    if rng.random() < 0.5:
        model.head.weight = model.embed.weight
    left_out = rng.choice(((), (), ("embed",), ("head",), ("embed", "head")))
    model.tp_plan = {name: style for name, style in PLAN.items() if name not in left_out}  # type: ignore[assignment]
    frozen = rng.choice((0, 0, 0.3, 0.7))
    for parameter in model.parameters():
        parameter.requires_grad_(rng.random() >= frozen)
    model.blocks[0].norm.weight.requires_grad_(True)
    return model


def tensor_step(strategy: Strategy, ranks: Gang, micros: Micros, count: int) -> float:
    """An update; returns the norm of its gradients."""
    for index, micro in enumerate(micros):
        with strategy.micro(last=index == len(micros) - 1):
            (loss_sum(strategy.model, micro[ranks.rank]) / count * ranks.size).backward()
    trained = [p for p in strategy.module.parameters() if p.grad is not None]
    norm = float(strategy.total_norm([p.grad for p in trained if p.grad is not None]))
    with torch.no_grad():
        for parameter in trained:
            assert parameter.grad is not None
            local(parameter).sub_(RATE * local(parameter.grad))
    strategy.module.zero_grad()
    return norm


class Steps(StepHooks):
    """Micro-batches of a pipeline; those that fill up a schedule have no weight."""

    def __init__(self, executor: PipelineExecutor, ranks: Gang, real: int, count: int) -> None:
        self._executor, self._factor, self._real = executor, ranks.size / count, real

    def micro_step(self, update: UpdateBatch, index: int) -> Tensor:
        loss = loss_sum(self._executor.model, update.batches[index])
        self._executor.backward(loss * (self._factor if index < self._real else 0.0))
        return loss.detach()


def _check_strides(optimizer: torch.optim.Optimizer) -> None:
    """Fused kernels of optimizers read a parameter and its gradient side by side in memory."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        if not is_sharded(parameter) and min(parameter.shape, default=0) > 1:
            assert parameter.grad.stride() == parameter.stride()


def pipelined(plan: PipelinePlan) -> Callable[[Strategy, Gang, Micros, int], float]:
    def step(strategy: Strategy, ranks: Gang, micros: Micros, count: int) -> float:
        assert isinstance(strategy, Pipeline)
        own = present(strategy.module.parameters())
        executor = PipelineExecutor(strategy, torch.optim.SGD(own, lr=RATE), CPU, plan)
        number = len(micros)
        update = UpdateBatch([micro[ranks.rank] for micro in micros], [[]] * number, 0, 0, False)
        update.denominator, update.total_samples = float(count), 1.0
        update.targets, update.samples = [1.0] * number, [1] * number
        hook = executor.optimizer.register_step_pre_hook(lambda optimizer, *_: _check_strides(optimizer))
        result = executor.run_step(update, Steps(executor, ranks, number, count), max_norm=1e9)
        hook.remove()
        return float(result.norm)

    return step


def drawn(rng: random.Random, ranks: Gang) -> tuple[Net, DistPlan, Any]:
    mesh = ranks.mesh
    if mesh.tensor > 1:
        shard = ShardPlan(wrap="transformer", layers=("Divided",)) if mesh.shard > 1 else None
        plan = DistPlan(strategy="ddp" if shard is None else "fsdp", shard=shard, tensor=mesh.tensor)
        return divided_net(rng, mesh.tensor), plan, tensor_step
    shard = ShardPlan(wrap="transformer", layers=("Block",)) if mesh.shard > 1 else None
    model, schedule = Net(rng), rng.choice(SCHEDULES)
    stages = 1 if schedule in SCHEDULES[:2] or len(model.blocks) < 2 * mesh.pipeline else 2
    pipeline = PipelinePlan(mesh.pipeline, schedule if stages == 2 else rng.choice(SCHEDULES[:2]), stages)  # type: ignore[arg-type]
    model.dummy_inputs = {"tokens": torch.arange(4)[None]}  # type: ignore[assignment]
    plan = DistPlan(strategy="ddp" if shard is None else "fsdp", shard=shard, pipeline=pipeline)
    return model, plan, pipelined(pipeline)


def check(seed: int, ranks: Gang) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model, plan, step = drawn(rng, ranks)
    model = model.double()
    plain, words = copy.deepcopy(model), model.embed.num_embeddings
    if plan.pipeline is not None and len(model.blocks) < len(plan.pipeline.placement):
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(ranks.world.rank)
    strategy = spread(model, plan, ranks, CPU)
    for _ in range(2):
        micros = [
            [torch.randint(words, (rng.randint(1, 2), rng.randint(2, 5))) for _ in range(ranks.size)]
            for _ in range(rng.randint(1, 5))
        ]
        batches = [batch for micro in micros for batch in micro]
        count = sum(batch.numel() for batch in batches)
        for batch in batches:
            (loss_sum(plain, batch) / count).backward()
        norm = math.sqrt(sum(p.grad.abs().square().sum() for p in plain.parameters() if p.grad is not None))
        assert math.isclose(step(strategy, ranks, micros, count), norm, rel_tol=1e-6), seed
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter.sub_(RATE * parameter.grad)
        plain.zero_grad()
    number = torch.tensor(float(ranks.world.rank))
    assert float(strategy.max_over_ranks(number)) == ranks.world.size - 1, seed
    state, reference = strategy.whole_state(), plain.state_dict()
    if ranks.world.is_main:
        assert state.keys() == reference.keys(), seed
        assert all(torch.allclose(state[n], v, rtol=0, atol=CLOSE) for n, v in reference.items()), seed
    tokens = torch.arange(3)[None]
    with torch.no_grad():
        assert (strategy.model(tokens=tokens) - plain(tokens)).abs().max() < CLOSE, seed
        with strategy.gathered():
            assert (strategy.module(tokens=tokens) - plain(tokens)).abs().max() < CLOSE, seed
    strategy.release()


class Several(Net):
    """Returns whole numbers, truth values and no elements beside its logits."""

    as_tuple = False

    def forward(self, tokens: Tensor) -> Any:
        logits = super().forward(tokens)
        found = {
            "logits": logits,
            "largest": logits.argmax(-1),
            "positive": logits > 0,
            "nothing": logits[:0],
        }
        return tuple(found.values()) if self.as_tuple else found


def check_outputs(ranks: Gang, as_tuple: bool) -> None:
    torch.manual_seed(0)
    model, tokens = Several(random.Random(6)).double(), torch.arange(4)[None]
    model.as_tuple, model.dummy_inputs = as_tuple, {"tokens": tokens}  # type: ignore[assignment]
    expected = model(tokens)
    strategy = spread(model, DistPlan(pipeline=PipelinePlan(ranks.mesh.pipeline)), ranks, CPU)
    found = strategy.model(tokens=tokens)
    if as_tuple:
        assert isinstance(found, tuple)
    else:
        assert found.keys() == expected.keys()
        assert found.logits is found["logits"] is found[0]
        assert found[:1] == (found.logits,)
        assert not hasattr(found, "loss")
        found, expected = found.to_tuple(), tuple(expected.values())
    assert len(found) == len(expected)
    assert all(torch.allclose(*pair) for pair in zip(found, expected, strict=True))
    with pytest.raises(ConfigError, match="bf16_full_eval=True: is not built for weights in the stages"):
        strategy.cast(torch.bfloat16, CPU)
    strategy.release()


def meshes(size: int) -> Iterator[Mesh]:
    yield from (Mesh(tensor=size), Mesh(pipeline=size))
    if size == 4:
        yield from (Mesh(shard=2, tensor=2), Mesh(replicate=2, pipeline=2), Mesh(shard=2, pipeline=2))


def main(first: int, last: int) -> None:
    world = world_from_environment()
    for mesh in meshes(world.size):
        ranks = join(world, CPU, mesh=mesh).over("loss")
        for seed in range(first, last):
            check(seed, ranks)
        if mesh == Mesh(pipeline=2):
            for as_tuple in (False, True):
                check_outputs(ranks, as_tuple)
        leave()
