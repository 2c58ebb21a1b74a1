"""Run on several ranks: drawn models, replicated or sharded by drawn plans, train as in one process, in float64.

Models have ties within and across units, shared modules, sparse gradients, frozen parameters, scalars, complex
parameters, and those without elements and with strides of their own; ranks begin with other weights than rank 0, and
have batches of other sizes.
"""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from windlass.config.plan import DistPlan, ShardPlan
from windlass.core.errors import ConfigError
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.dist.sharded import local, whole
from windlass.transforms.strategies import spread
from windlass.transforms.strategy import Strategy

CPU, CLOSE = torch.device("cpu"), 1e-9


class Block(nn.Module):
    def __init__(self, rng: random.Random, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if rng.random() < 0.6 else nn.Identity()
        self.up = nn.Linear(width, inner, bias=rng.random() < 0.6)
        self.down = nn.Linear(inner, width, bias=rng.random() < 0.6)
        shapes: dict[str, Any] = {"empty": ((0,), (0, width), (width, 0)), "scale": ((), (1,), (width,))}
        for name, choice in shapes.items():
            drawn = torch.randn(rng.choice(choice))
            self.register_parameter(name, nn.Parameter(drawn) if rng.random() < 0.25 else None)
        turned = nn.Parameter(
            torch.randn(width, width).T if rng.random() < 0.5 else torch.randn(width, width)
        )
        self.register_parameter("gate", turned if rng.random() < 0.2 else None)
        wave = nn.Parameter(torch.randn(width, dtype=torch.complex128))
        self.register_parameter("wave", wave if rng.random() < 0.2 else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.wave is not None:
            x = torch.fft.ifft(torch.fft.fft(x) * self.wave).real
        made = self.down(torch.tanh(self.up(self.norm(x))))
        if self.empty is not None:
            made = made + self.empty.sum()
        if self.scale is not None:
            made = made * self.scale
        # A gradient of this product lies in memory as the transposed weight does.
        return x + (made if self.gate is None else made + torch.einsum("...i,oi->...o", x, self.gate))


class Net(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width, inner, blocks = rng.randint(1, 7), rng.randint(1, 9), rng.randint(1, 4)
        self.embed = nn.Embedding(rng.randint(5, 10), width)
        self.blocks = nn.ModuleList(Block(rng, width, inner) for _ in range(blocks))
        self.head = nn.Linear(width, self.embed.num_embeddings, bias=rng.random() < 0.5)
        if rng.random() < 0.4:
            self.head.weight = self.embed.weight
        if blocks > 1 and rng.random() < 0.4:
            one, other = rng.sample(range(blocks), 2)
            self.blocks[one].up.weight = self.blocks[other].up.weight
        if blocks > 1 and rng.random() < 0.2:
            self.blocks[1].down = self.blocks[0].down
        if rng.random() < 0.2:
            self.unused = nn.Linear(width, 3).requires_grad_(False)
        frozen = rng.choice((0, 0, 0.3, 0.8))
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.requires_grad and rng.random() >= frozen)
        if not any(p.requires_grad and p.numel() for p in self.parameters()):
            self.head.weight.requires_grad_(True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def drawn_plan(rng: random.Random, kind: str, ranks: int, blocks: int) -> DistPlan:
    if kind == "ddp":
        return DistPlan(find_unused_parameters=rng.choice((None, True, False)))
    wraps: list[dict[str, Any]] = [
        {"wrap": "transformer", "layers": ("Block",), "recompute": rng.random() < 0.3 and blocks > 1},
        {"wrap": "transformer", "layers": ("Block", "Linear")},
        {"wrap": "size", "min_parameters": rng.choice((1, 5, 40))},
        {},
    ]
    shard = ShardPlan(
        reshard=rng.random() < 0.7,
        replicas=rng.choice((1, 1, 1, ranks)),
        cpu_offload=rng.random() < 0.2,
        ignored=rng.choice((None, None, None, "blocks.0", "embed", "blocks.0.up")),
        forward_prefetch=rng.choice((0, 0, 1)),
        backward_prefetch=rng.choice((0, 0, 2)),
        **rng.choice(wraps),
    )
    return DistPlan(strategy="fsdp", shard=shard, find_unused_parameters=rng.choice((None, True)))


def loss_sum(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        model(tokens).flatten(0, -2), tokens.roll(1, -1).flatten(), reduction="sum"
    )


def check(seed: int, kind: str, ranks: Gang) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(rng).double()
    tied = model.head.weight is model.embed.weight
    model.embed.sparse = kind == "ddp" and not tied and rng.random() < 0.3
    plain, plan, words = (
        copy.deepcopy(model),
        drawn_plan(rng, kind, ranks.size, len(model.blocks)),
        model.embed.num_embeddings,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(ranks.rank)
    strategy = spread(model, plan, ranks, CPU)
    for _ in range(2):
        accumulation = rng.randint(1, 3)
        micros = [
            [torch.randint(words, (rng.randint(1, 2), rng.randint(2, 5))) for _ in range(ranks.size)]
            for _ in range(accumulation)
        ]
        count = sum(batch.numel() for micro in micros for batch in micro)
        for batch in (batch for micro in micros for batch in micro):
            (loss_sum(plain, batch) / count).backward()
        for index, micro in enumerate(micros):
            with strategy.micro(last=index == accumulation - 1):
                (loss_sum(strategy.model, micro[ranks.rank]) / count * ranks.size).backward()
        strategy.check_reached()
        strategy.check_used()
        expected = {n: p.grad.to_dense() for n, p in plain.named_parameters() if p.grad is not None}
        norm = strategy.total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert math.isclose(
            norm, math.sqrt(sum(g.abs().square().sum() for g in expected.values())), rel_tol=CLOSE
        ), seed
        check_norms(strategy, model, list(expected.values()), kind)
        own = dict(model.named_parameters())
        for name, gradient in expected.items():
            found = own[name].grad
            if gradient.numel():
                assert found is not None, (seed, name)
                dense = found.to_dense() if found.is_sparse else whole(found)
                assert (dense - gradient).abs().max() < CLOSE, (seed, name)
        strategy.multiply([p.grad for p in model.parameters() if p.grad is not None], 0.1 / (norm + 1))
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.1 / (norm + 1)
        with torch.no_grad():
            for parameter in (*plain.parameters(), *model.parameters()):
                if parameter.grad is not None:
                    local(parameter).sub_(local(parameter.grad))
        plain.zero_grad()
        model.zero_grad()
    state, reference = strategy.whole_state(), plain.state_dict()
    if ranks.rank == 0:
        assert state.keys() == reference.keys(), seed
        assert all(torch.allclose(state[n], v, rtol=0, atol=CLOSE) for n, v in reference.items()), seed
    with strategy.gathered(), torch.no_grad():
        tokens = torch.arange(3)[None]
        assert (strategy.module(tokens) - plain(tokens)).abs().max() < CLOSE, seed
    strategy.release()


def check_norms(strategy: Strategy, model: nn.Module, expected: list[Tensor], kind: str) -> None:
    """Norms of other orders than 2."""
    for order in (1.0, 3.0, -1.0, math.inf, -math.inf):
        filled = [g for g in expected if g.numel()]
        if (order < 0 or math.isinf(order)) and kind == "ddp" and len(filled) < len(expected):
            continue  # torch has no largest or smallest element of none
        found = strategy.norm_of_order([p.grad for p in model.parameters() if p.grad is not None], order)
        # Of a negative order, a gradient of rounding errors alone decides.
        assert math.isclose(found, nn.utils.get_total_norm(filled, order), rel_tol=CLOSE, abs_tol=1e-12), (
            order
        )
    if kind != "ddp":
        with pytest.raises(ConfigError, match="norm_type"):
            strategy.norm_of_order(expected, 0.0)


def main(kind: str, first: int, last: int) -> None:
    ranks = join(world_from_environment(), CPU).over("loss")
    for seed in range(first, last):
        check(seed, kind, ranks)
    leave()
