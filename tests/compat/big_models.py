"""Small models with what makes placement hard: ties, buffers of both kinds, parameters beside submodules."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block with a parameter of its own and buffers of both kinds."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale = nn.Parameter(torch.rand(width))
        self.register_buffer("shift", torch.rand(width))
        self.register_buffer("factor", torch.rand(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.scale * self.factor + self.shift


class Model(nn.Module):
    """Embedding, a parameter at the root, blocks, and a head tied to the embedding."""

    def __init__(self, layers: int = 3, width: int = 8, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.position = nn.Parameter(torch.rand(width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def seeded(seed: int = 0, **sizes: int | bool) -> Model:
    """A model with weights that depend on the seed, in evaluation mode."""
    torch.manual_seed(seed)
    return Model(**sizes).eval()  # type: ignore[arg-type]


IDS = torch.arange(5)


class RandomBlock(nn.Module):
    """Layers, and perhaps a parameter and a buffer, of random sizes."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.a = nn.Linear(rng.randint(1, 9), rng.randint(1, 9))
        self.b = nn.Sequential(
            *[nn.Linear(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(0, 2))]
        )
        if rng.random() < 0.5:
            self.w = nn.Parameter(torch.zeros(rng.randint(1, 9)))
        if rng.random() < 0.5:
            self.register_buffer("buffer", torch.zeros(rng.randint(1, 9)))


class RandomModel(nn.Module):
    """A model only to be measured."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        if rng.random() < 0.4:
            self.p = nn.Parameter(torch.zeros(rng.randint(1, 20)))
        self.embedding = nn.Embedding(rng.randint(2, 12), 6)
        self.blocks = nn.ModuleList([RandomBlock(rng) for _ in range(rng.randint(1, 4))])
        self.norm = nn.LayerNorm(6)
        if rng.random() < 0.4:
            self.register_buffer("buffer", torch.zeros(rng.randint(1, 20)))
        self.head = nn.Linear(6, self.embedding.num_embeddings, bias=rng.random() < 0.5)
        if rng.random() < 0.5:
            self.head.weight = self.embedding.weight
