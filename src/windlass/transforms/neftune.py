"""NEFTune (Jain et al., arXiv:2310.05914): noise on the input embeddings during training.

Uniform noise in [-1, 1] times `alpha / sqrt(L * d)` is added to the embedding of each token: L is the number of tokens
of its own sequence, without padding, and d the width. The noise is drawn from PyTorch's generator, which a run seeds
from (seed, update, rank), so a resumed run repeats it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError, Problem


@contextlib.contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """Context in which the input embeddings of `model` have noise while it is in training mode.

    Nothing of it is in a state dict, and the hooks are removed at the end, also after an exception. Raises ConfigError
    if the model does not show its input embeddings.

    Args:
        model: the bare module.
        alpha: scale of the noise; None or 0 for none.
    """
    if not alpha:
        yield
        return
    embeddings, noise = input_embeddings(model), _Noise(alpha)
    with (
        model.register_forward_pre_hook(noise.look, with_kwargs=True),
        embeddings.register_forward_hook(noise.add),
    ):
        yield


def input_embeddings(model: nn.Module) -> nn.Module:
    """The module that maps token ids to vectors: `model.get_input_embeddings()`, or its only `nn.Embedding`. Raises
    ConfigError if there is none, or several.
    """
    getter = getattr(model, "get_input_embeddings", None)
    if callable(getter):
        found = getter()
        if isinstance(found, nn.Module):
            return found
    layers = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if len(layers) != 1:
        fix = (
            f"{type(model).__name__} has {len(layers)} embeddings and no get_input_embeddings() that names one: add "
            "that method, or leave neftune_noise_alpha out"
        )
        raise ConfigError(Problem("neftune_noise_alpha", "set", fix))
    return layers[0]


class _Noise:
    """Adds the noise of one forward, whose mask and positions it has seen."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._mask: Tensor | None = None
        self._positions: Tensor | None = None

    def look(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        """Before a forward of the model: take what shows the lengths of its sequences."""
        self._mask = _two_axes(keywords.get("attention_mask"))
        self._positions = _two_axes(keywords.get("position_ids"))

    def add(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        if not module.training or output.dim() != 3:
            return output
        lengths = sequence_lengths(output, self._mask, self._positions)
        scale = self._alpha / (lengths * output.shape[-1]).sqrt()
        # Drawn in float32, so that a model has the same noise in any precision.
        noise = torch.empty_like(output, dtype=torch.float32).uniform_(-1, 1) * scale.unsqueeze(-1)
        return output + noise.to(output.dtype)


def sequence_lengths(output: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
    """For each token the number of tokens of its sequence that are not padding, at least 1: fp32, (batch, length).

    Args:
        output: embeddings, (batch, length, width).
        mask: (batch, length), 0 for padding; None: nothing is padding.
        positions: (batch, length), 0 at each start of a packed sequence; None: one sequence per row.

    No host sync.
    """
    shape = output.shape[:2]
    real = torch.ones(shape, device=output.device)
    if mask is not None and mask.shape == shape:
        real = (mask != 0).to(real.dtype)
    if positions is None or positions.shape[-1] != shape[1]:
        return real.sum(1, keepdim=True).clamp(min=1).expand(shape)
    # Segments of a row are numbered from 0; padding before the first one gets a number too, and counts nothing.
    starts = ((positions == 0).expand(shape) & (real != 0)).long()
    segments = starts.cumsum(1)
    counts = torch.zeros(shape[0], shape[1] + 1, device=output.device).scatter_add_(1, segments, real)
    return counts.gather(1, segments).clamp(min=1)


def _two_axes(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) and value.dim() == 2 else None
