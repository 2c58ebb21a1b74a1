"""Runtime and throughput of a run, and the floating-point operations of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import nn

from windlass.core.run_clock import seconds_since
from windlass.core.tensors import count_elements


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Return the seconds since `start_time` (a `Moment` or `time.time()`) and the rates of the given counts.

    Returns:
        `{split}_runtime` in seconds (4 digits), `{split}_samples_per_second`, `_steps_per_second` and
        `_tokens_per_second` (3 digits); rates are omitted if no time passed.
    """
    runtime = seconds_since(start_time)
    metrics = {f"{split}_runtime": round(runtime, 4)}
    if runtime <= 0:
        return metrics
    for name, count in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
        if count is not None:
            metrics[f"{split}_{name}_per_second"] = round(count / runtime, 3)
    return metrics


# The floating-point operations that a model needs for an update, counted once from its parameters and configuration.
#
# For each position: 2 for each parameter that is multiplied with it in the forward, 2 more to pass the gradient on,
# and 2 more if the parameter is trained (6 N of Kaplan et al. 2020, section 2.1). Embedding tables are looked up and
# do not count, unless they are the weight of a layer too. Attention adds 12 x layers x width x length of the row
# (Chowdhery et al. 2022, "PaLM", appendix B), without a discount for the causal mask.
#
# What is computed again to save memory is not counted: this is utilisation of the model's FLOPs, not of the
# hardware's.
#
# The length of a row is the mean one, padding included. The count of a frozen part below which nothing is trained is
# too high, because no gradient passes it. Attention in an encoder with a decoder, and in models whose configuration
# does not have layers and width, is left out.


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs for each position."""

    position: float  # of the parameters
    attention: float  # for each further position of the same row

    def of(self, positions: float, rows: float) -> float:
        """Return the FLOPs of so many positions in so many rows."""
        length = positions / rows if rows else 0.0
        return positions * (self.position + self.attention * length)


def count_flops(model: nn.Module) -> ModelFlops | None:
    """Return what the model needs for each position; None if its parameters do not show it."""
    config = getattr(model, "config", None)
    # Experts take part in some positions only, and convolutions in many products for each value of their input.
    chosen = getattr(getattr(config, "text_config", None) or config, "num_experts_per_tok", None)
    # Some configurations have that number under other names, or do not have it: their layers hold `experts`.
    mixes = chosen is not None or any(name.endswith(".experts") for name, _ in model.named_modules())
    if mixes or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None
    parameters = multiplied(model)
    if not all(p.is_floating_point() for p in parameters):  # several weights are packed into one number
        return None
    trained = count_elements(p for p in parameters if p.requires_grad)
    frozen = count_elements(p for p in parameters if not p.requires_grad)
    return ModelFlops(6.0 * trained + 4.0 * frozen, _attention(config))


def multiplied(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that every position is multiplied with: all but embedding tables, which are looked up. A table
    that is the weight of a layer too is one of them.
    """
    tables = _weights_of(model, nn.Embedding) - _weights_of(model, nn.Linear)
    return [p for p in model.parameters() if id(p) not in tables]


def _weights_of(model: nn.Module, kind: type[nn.Module]) -> set[int]:
    """The ids of parameters called "weight". The attribute may be computed, as `weight_norm` does: torch before 2.11
    cannot do so of shards.
    """
    found = (part.named_parameters(recurse=False) for part in model.modules() if isinstance(part, kind))
    return {id(param) for own in found for name, param in own if name == "weight"}


def _attention(config: Any) -> float:
    if config is None or getattr(config, "is_encoder_decoder", False):
        return 0.0
    text = getattr(config, "text_config", None) or config
    layers = getattr(text, "num_hidden_layers", None)
    heads, size = getattr(text, "num_attention_heads", None), getattr(text, "head_dim", None)
    if _is_count(heads) and _is_count(size):
        width: Any = heads * size
    else:
        width = getattr(text, "hidden_size", None)
    return 12.0 * layers * width if _is_count(layers) and _is_count(width) else 0.0


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0
