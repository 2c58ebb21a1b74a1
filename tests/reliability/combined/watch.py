"""What is observed of a run on its way, and the instants at which it can be killed."""

from __future__ import annotations

import os
from typing import Any

import torch
from tests.reliability.combined.models import VOCABULARY
from tests.reliability.faults import OPERATIONS, Countdown, at_operation, die
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from windlass import TrainerCallback
from windlass.dist.sharded import Absent, local


def held(parameter: Tensor) -> Tensor:
    """The part of a parameter that this process holds; ZeRO's third stage keeps it beside an empty parameter. Nothing
    of one of another stage of a pipeline.
    """
    if isinstance(parameter, Absent):
        return torch.empty(0)
    return local(getattr(parameter, "ds_tensor", parameter)).detach()


class Instants:
    """Counts forwards of modules, parts of updates and file operations: at each of them a process may die.

    Args:
        place: the one at which this process kills itself, from 1; None to live.
    """

    def __init__(self, place: int | None) -> None:
        self.count, self._counts = 0, True
        self._strike = None if place is None else Countdown(place, die)
        at_operation(OPERATIONS["any"], self.passes)
        register_module_forward_pre_hook(lambda module, inputs: self.passes())

    def passes(self) -> None:
        if self._counts:
            self.count += 1
            if self._strike is not None:
                self._strike()

    def stop(self) -> None:
        """The run is over: what follows belongs to the test."""
        self._counts = False


class Watch(TrainerCallback):
    """Observes updates. A loop of its own calls `begin` and `update` itself.

    Attributes:
        seen: see `Outcome.seen`.
    """

    def __init__(self, instants: Instants, decay: float | None = None) -> None:
        self._instants, self._decay = instants, decay
        self._started: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._prompts = set[nn.Module]()  # embeddings of learnt prompts: a forward has one more of them
        self.seen: dict[str, Any] = {
            "rates": [],
            "norms": [],
            "forwards": 0,
            "layers": 0,
            "dtypes": [],
            "widths": [],
            "readers": [],
        }
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        # Before it: a forward that is made again for the backward may end early, with what the backward lacks.
        if isinstance(module, nn.Linear) and module.training and torch.is_grad_enabled():
            self.seen["layers"] += 1

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        # Not those of positions, and of learnt prompts.
        of_tokens = isinstance(module, nn.Embedding) and module.num_embeddings >= VOCABULARY
        if of_tokens and module not in self._prompts:
            self.seen["forwards"] += 1
            self.seen["widths"].append(list(inputs[0].shape))
        elif isinstance(module, nn.Linear) and isinstance(output, Tensor):
            name = str(output.dtype).removeprefix("torch.")
            if name not in self.seen["dtypes"]:
                self.seen["dtypes"].append(name)

    # --- what a Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.begin(model)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self.update(model, optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.updated()

    # --- what it does

    def begin(self, model: nn.Module) -> None:
        self._started = {name: held(p).clone() for name, p in model.named_parameters()}
        self._trained = dict(model.named_parameters())
        self._prompts = {module for name, module in model.named_modules() if "prompt_encoder" in name}
        elements = sum(tensor.numel() for tensor in self._started.values())
        self.seen["devices"] = sorted({p.device.type for p in model.parameters()})
        self.seen["share"] = elements / sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())

    def update(self, model: nn.Module, optimizer: Any) -> None:
        """Gradients are whole and clipped, and the optimizer is about to use them."""
        self._instants.passes()
        kind = type(getattr(optimizer, "optimizer", optimizer))
        self.seen["optimizer"] = f"{kind.__module__}.{kind.__qualname__}"
        # ZeRO's third stage takes the parameters of all groups.
        groups = [group for group in optimizer.param_groups if group["params"]] or optimizer.param_groups
        self.seen["rates"].append([float(group["lr"]) for group in groups])
        # Of the first update: a schedule that follows a metric keeps no rate but the present one.
        self.seen.setdefault("peaks", [[float(group.get("initial_lr", group["lr"]))] for group in groups])
        self.seen["warm-up"] = groups[0].get("warmup_steps")
        squares = [
            float(local(p.grad).double().square().sum()) for p in model.parameters() if p.grad is not None
        ]
        self.seen["norms"].append(sum(squares) ** 0.5)

    def updated(self) -> None:
        self._instants.passes()
        if self._decay is not None:
            self._add_to_average(self._decay)

    def _add_to_average(self, decay: float) -> None:
        for name, parameter in self._trained.items():
            mine = held(parameter)
            before = self._average.get(name)
            self._average[name] = mine.clone() if before is None else before.lerp(mine, 1 - decay)

    def end(self, model: nn.Module) -> None:
        """Note which parameters have moved, and how far they are from their average by hand."""
        now = {name: held(p) for name, p in model.named_parameters()}
        same = now.keys() == self._started.keys()
        self.seen["moved"] = [
            name for name in now if same and not torch.equal(now[name], self._started[name])
        ]
        if self._average:
            self.seen["from average"] = max(
                float((now[name] - mean).abs().max()) for name, mean in self._average.items() if mean.numel()
            )
        self.seen["process"] = os.getpid()
