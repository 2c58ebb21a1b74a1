"""A Trainer in one line, and as a table in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from torch import nn

from windlass.core.events import TrainerState
from windlass.core.module_state import bare
from windlass.core.output import in_html
from windlass.core.tensors import count_elements


def facts(
    model: nn.Module, train_dataset: Any, eval_dataset: Any, state: TrainerState, **others: Any
) -> dict[str, str]:
    """Return what a Trainer trains, on what, and how far it is. `others` come last."""
    parameters = [*model.parameters()]
    total, trainable = count_elements(parameters), count_elements(p for p in parameters if p.requires_grad)
    found = {"model": f"{type(bare(model)).__name__} ({total:,} parameters, {trainable:,} trainable)"}
    for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
        if dataset is not None:
            found[name] = _samples(dataset)
    progress = f"{state.global_step:,} of {state.max_steps:,} updates" if state.max_steps else "not started"
    return {**found, "progress": progress, **{name: str(value) for name, value in others.items()}}


def html(title: str, rows: Mapping[str, str]) -> str:
    """Return the facts as a table."""
    body = "".join(
        f'<tr><th style="text-align:left">{in_html(name)}</th><td style="text-align:left">{in_html(value)}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table><caption>{in_html(title)}</caption>{body}</table>"


def _samples(dataset: Any) -> str:
    if isinstance(dataset, dict):
        return ", ".join(f"{name}: {_samples(part)}" for name, part in dataset.items())
    try:
        return f"{len(dataset):,} samples" if isinstance(dataset, Sized) else type(dataset).__name__
    except TypeError:  # a stream whose class has a length that only some of its objects know
        return type(dataset).__name__
