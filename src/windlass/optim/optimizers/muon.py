"""Muon (Jordan et al., 2024; Liu et al., arXiv:2502.16982): matrices move along their orthogonalised momentum.

It is defined for the matrices of hidden layers. Embeddings, the output layer and vectors are updated by AdamW.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon
from torch.optim.optimizer import Optimizer, ParamsT

from windlass.core.logs import get_job_logger
from windlass.optim.optimizers.options import recipe_of
from windlass.optim.per_parameter import CopiedOptimizer, called

_log = get_job_logger(__name__)
# Output layers by the names that models give them; transformers' models are asked for theirs.
_HEADS = re.compile(
    r"(^|\.)(lm_head|head|heads|classifier|score|qa_outputs|embed_out|output_projection)(\.|$)"
)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class MuonWithAdamW(CopiedOptimizer):
    """Torch's Muon for the groups with `use_muon=True`, torch's AdamW for those with False.

    Args:
        params: groups; each has `use_muon` (see `arrange`).
        lr: learning rate of both.
        weight_decay: decoupled, times the learning rate.
        momentum, nesterov, ns_steps: of Muon; `ns_steps` Newton-Schulz iterations make the momentum orthogonal.
        adjust_lr_fn: "match_rms_adamw" multiplies Muon's rate by `0.2 * sqrt(max(rows, columns))`, so that a learning
            rate for AdamW fits both; "original" by `sqrt(max(1, rows / columns))`.
        betas, eps: of AdamW.

    Raises:
        ValueError: a group lacks `use_muon`, or has it for a parameter that is not a matrix.
    """

    elementwise = False
    copied = ("_inner", "_options")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        of_both: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        of_muon = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        # Before torch's constructor, which adds the groups one by one.
        self._options = {True: {**of_both, **of_muon}, False: {**of_both, "betas": betas, "eps": eps}}
        self._inner: dict[bool, Optimizer] = {}
        super().__init__(params, {**of_both, "use_muon": None})
        if True not in self._inner:
            _log.warning("Muon: no matrix of a hidden layer is trained here, so AdamW updates all parameters")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. `param_group` is a dict as in the constructor; options that it lacks are the optimizer's.
        Raises ValueError as the constructor does.
        """
        use = param_group.get("use_muon")
        if use is None:
            raise ValueError("each group needs use_muon; MuonWithAdamW.arrange(model, groups) sets it")
        super().add_param_group(param_group)
        # The inner optimizers get the same dicts as this one has, and torch adds their options to them in place.
        # So a schedule that sets "lr" here sets it there, and a checkpoint has the options of each. Torch's Muon checks
        # in its constructor alone that parameters are matrices, so it is constructed again for each group.
        self._inner[use] = (_MuonAnywhere if use else AdamW)(self._groups(use), **self._options[use])

    @classmethod
    def arrange(cls, model: nn.Module, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Split each group without `use_muon` into the matrices of hidden layers and the rest; no empty groups."""
        others = set(_outer_parameters(model))
        arranged = []
        for group in groups:
            if "use_muon" in group:
                arranged.append(group)
                continue
            for use in (True, False):
                fitting = [p for p in group["params"] if (_is_matrix(p) and p not in others) == use]
                arranged.append({**group, "params": fitting, "use_muon": use})
        return [group for group in arranged if group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. `closure`, if given, recomputes and returns the loss."""
        loss = called(closure)
        for use, inner in self._inner.items():
            # The groups and states are this object's; loading a state dict replaces both.
            inner.param_groups, inner.state = self._groups(use), self.state
            inner.step()
        return loss

    def _groups(self, use: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["use_muon"] == use]


class _MuonAnywhere(Muon):
    """Torch's Muon, and in operations of its own where that does not do: see `_is_own`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        for group in filter(_is_own, groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _move(parameter, parameter.grad, self.state[parameter], group)
        # Torch's step gets the remaining groups; the state is one for all.
        self.param_groups = [group for group in groups if not _is_own(group)]
        try:
            return super().step(closure)  # type: ignore[no-untyped-call]
        finally:
            self.param_groups = groups


def _is_own(group: dict[str, Any]) -> bool:
    """PyTorch/XLA's compiler has no `addmm` with factors, and would read matrices back and multiply them on the host.
    And before torch 2.15, without Nesterov's term, torch divides momentum in bfloat16 by its norm, in place.
    """
    bfloat16 = any(parameter.dtype == torch.bfloat16 for parameter in group["params"])
    on_xla = any(parameter.device.type == "xla" for parameter in group["params"])
    return on_xla or (bfloat16 and not group["nesterov"])


def _move(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One update of a matrix, with the state of torch's Muon."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
    buffer, momentum = state["momentum_buffer"], group["momentum"]
    buffer.lerp_(gradient, 1 - momentum)
    direction = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
    direction = orthogonalized(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
    rows, columns = parameter.shape
    factors = {
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
        "original": math.sqrt(max(1, rows / columns)),
        "spectral_unclamped": math.sqrt(rows / columns),
    }
    factor = factors[group["adjust_lr_fn"] or "original"]
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(direction, alpha=-group["lr"] * factor)


def orthogonalized(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> Tensor:
    """The nearest matrix with orthogonal rows or columns, nearly: `steps` Newton-Schulz iterations in bfloat16
    (Jordan et al., 2024). Equal to torch's own but for the rounding of single operations.
    """
    a, b, c = coefficients
    # The Gram matrix is that of the smaller side: transposing a tall matrix makes the products cheaper.
    tall = matrix.size(0) > matrix.size(1)
    found: Tensor = matrix.bfloat16().T if tall else matrix.bfloat16()
    # Not in place: `bfloat16()` of a bfloat16 matrix is that matrix, which may be the momentum. The iteration
    # converges for singular values up to 1, and the Frobenius norm is at least the largest of them.
    found = found / found.norm().clamp(min=epsilon)
    for _ in range(steps):
        gram = found @ found.T
        found = a * found + (b * gram + c * (gram @ gram)) @ found
    return found.T if tall else found


def _is_matrix(parameter: Tensor) -> bool:
    """Return True for a real one: Newton-Schulz iterations in bfloat16 would drop the imaginary part."""
    return parameter.dim() == 2 and not parameter.is_complex()


def _outer_parameters(model: nn.Module) -> Iterator[Tensor]:
    """Parameters of embeddings and of output layers, tied ones once."""
    ask: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
    head = None if ask is None else ask()
    for name, module in model.named_modules():
        if isinstance(module, _EMBEDDINGS) or module is head or _HEADS.search(name):
            yield from module.parameters()


muon = recipe_of(MuonWithAdamW)
