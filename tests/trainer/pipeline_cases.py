"""Runs of small models in float64, the same on one process and on ranks that divide their layers."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from tests.trainer import context_cases
from tests.trainer.context_cases import (
    KEPT,
    Noted,
    arguments,
    collate,
    first_logits,
    killing,
    layout,
    samples,
    token_loss,
)
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from windlass import LossTerms
from windlass.cli.proving.proving_rank import double_precision
from windlass.core.errors import ConfigError, ModelError
from windlass.dist.gang import leave
from windlass.dist.sharded import whole


def deepen_models() -> None:
    """Give the models of this process layers for all stages, and add two."""
    models = context_cases.MODELS
    models.update({name: (kind, context_cases.deep(options)) for name, (kind, options) in models.items()})
    models["late experts"] = (  # of the second stage alone
        "Qwen3MoeConfig",
        models["qwen3_moe"][1]
        | {"mlp_only_layers": [0, 1], "output_router_logits": True, "router_aux_loss_coef": 5.0},
    )
    models["dropping"] = ("LlamaConfig", models["tied"][1] | {"attention_dropout": 0.2})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, states: Tensor) -> Any:
        return states + torch.tanh(self.inner(states))


class Pair(Block):
    """Returns more than its states, as blocks with a cache do."""

    def forward(self, states: Tensor) -> Any:
        return super().forward(states), None


class Plain(nn.Module):
    """A model of layers that no library knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 16)
        self.first, self.second, self.third = Pair(), Block(), Block()
        self.head = nn.Linear(16, 23)
        self.dummy_inputs = {"input_ids": torch.arange(6)[None]}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        states = self.third(self.second(self.first(self.table(input_ids))[0] * 0.5))
        logits = self.head(states)
        if labels is None:
            return {"logits": logits}
        return {"loss": token_loss({"logits": logits}, labels), "logits": logits}


class Skipping(Plain):
    """Its last layer reads what the first one gets, which a stage does not pass on."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        first = self.table(input_ids)
        logits = self.head(self.third(self.second(self.first(first)[0])) + first)
        return {"loss": logits.mean(), "logits": logits}


class Frozen(Plain):
    """A stage that begins with its second layer has all that is trained."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.table, self.first):
            part.requires_grad_(False)


class Wrapping(Plain):
    """Its output is an object of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(**super().forward(*args, **kwargs))


class Centred(nn.Module):
    """Subtracts a running average of what it has got."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, states: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(states.detach().mean((0, 1)), 0.5)
        return states - self.mean.clone()


class Averaging(Plain):
    """Its first and its last layer keep running averages."""

    def __init__(self) -> None:
        super().__init__()
        for block in (self.first, self.third):
            block.inner = nn.Sequential(nn.Linear(16, 16), Centred())  # type: ignore[assignment]


class OwnLoss(Noted):
    """Overrides `compute_loss`, with a loss whose weight is known afterwards."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(logits, targets, reduction="sum")
        terms = LossTerms(total, (targets != -100).sum() * 2)
        return (terms, outputs) if return_outputs else terms


def crossed() -> nn.Module:
    """Of four stages on two ranks each has a copy of a weight of the other: blocks 0 and 1 are tied, and 2 and 3."""
    blocks = [Block() for _ in range(6)]
    for one, other in ((0, 1), (2, 3)):
        blocks[other].inner.weight = blocks[one].inner.weight
    return nn.Sequential(nn.Embedding(23, 16), *blocks, nn.Linear(16, 23))


_OWN_MODELS = {
    "plain": Plain, "skipping": Skipping, "averaging": Averaging, "frozen": Frozen, "wrapping": Wrapping,
}  # fmt: skip


def made(name: str) -> Any:
    if name in context_cases.MODELS:
        return context_cases.model(name)
    if name.startswith("adapted "):
        return adapted(name.partition(" ")[2])
    torch.manual_seed(0)
    if name == "crossed":
        return crossed().double()
    if name in _OWN_MODELS:
        return _OWN_MODELS[name]().double()
    layers = [nn.Embedding(23, 16), Block(), nn.ReLU(), Block(), nn.Linear(16, 23)]
    return nn.Sequential(*layers).double()


def adapted(name: str) -> Any:
    """A model of which low-rank factors are trained."""
    import peft

    base = context_cases.model(name)
    torch.manual_seed(1)
    layers = ["q_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=layers, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config, autocast_adapter_dtype=False)


class OfSequence(Noted):
    """Trains a model that takes one tensor, and has no loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = model(inputs["input_ids"])
        loss = token_loss({"logits": logits}, inputs["labels"])
        return (loss, {"loss": loss, "logits": logits}) if return_outputs else loss


_TRAINERS: dict[str, type[Noted]] = {"own": OwnLoss, "sequence": OfSequence}


def train(
    name: str,
    folder: Path,
    *,
    trainer: str = "",
    own_loss: bool = False,
    resume: bool | str = False,
    evaluate_first: bool = False,
    counted: bool = False,
    single: bool = False,
    killed_at: int = 0,
    killed_on: str = "on_step_end",
    **changes: Any,
) -> dict[str, list[float]]:
    """Train, evaluate and save; return what was reported, and the weights that were saved. `counted`: train only, and
    return how many forwards FSDP2 began, how often it reduced gradients, and of how many units. `single`: in float32.
    """
    kind = _TRAINERS.get(trainer, Noted)
    run = kind(
        made(name).float() if single else made(name),
        arguments(folder, **{"remove_unused_columns": name not in ("sequence", "crossed"), **changes}),
        data_collator=collate,
        train_dataset=samples(),
        eval_dataset=samples(7),
        compute_loss_func=None
        if own_loss or trainer or changes.get("label_smoothing_factor")
        else token_loss,
        compute_metrics=first_logits,
        callbacks=killing(killed_at, killed_on),
    )
    if evaluate_first:
        run.evaluate()
    if counted:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run.train()
        # Not `seen.events()`, which makes a tree of all that an update does: it takes longer than the run.
        names = [event.name() for event in seen.profiler.kineto_results.events()]
        reduced = [name for name in names if name.startswith("FSDP::post_backward_reduce")]
        return {
            "begun": [names.count("FSDP::root_pre_forward")],
            "reduced": [len(reduced), len(set(reduced))],
        }
    result = run.train(resume_from_checkpoint=resume)
    run.evaluate()
    run.save_model(str(folder / "saved"))
    kind = "adapter_model" if name.startswith("adapted ") else "model"
    saved = load_file(folder / "saved" / f"{kind}.safetensors")
    head = whole(run.model.get_parameter("lm_head.weight")) if name == "dropping" else torch.zeros(1)
    reported = [[one[key] for key in KEPT if key in one] for one in run.noted]
    return {
        "reported": [value for one in reported for value in one] + [result.training_loss],
        "weights": torch.cat([saved[key].flatten() for key in sorted(saved)]).tolist(),
        "head": head.flatten().tolist(),
    }


def main(folder: Path, cases: dict[str, Any]) -> dict[str, Any]:
    deepen_models()
    found: dict[str, Any] = {}
    for case, (name, parallel, changes) in cases.items():
        precision = contextlib.nullcontext() if changes.get("single") else double_precision()
        with contextlib.redirect_stdout(sys.stderr), precision:
            try:
                found[case] = train(name, folder / case, **layout(parallel), **changes)
            except (ConfigError, ModelError) as error:
                found[case] = {"error": str(error)}
            leave()  # the next case may have another layout
    return found
