"""What the ranks of a run compare before it starts: a difference would hang it, or train other weights on each rank.

Each check is one exchange of a hash; a world of one exchanges nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from windlass.config.arguments import shared_arguments
from windlass.config.plan import RunPlan
from windlass.data.prepare import is_stream
from windlass.dist.alike import check_alike, model_facts
from windlass.dist.gang import Gang
from windlass.trainer.hooks import Overridable

# Fields of a plan that may differ between ranks, under other names than the arguments that may.
_OF_THIS_RANK = {"data": ("workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context",
                          "in_order"), "save": ("output_dir", "host_memory"),
                 "dist": ("timeout_seconds",), "reports": ("empty_cache_every",)}  # fmt: skip
_DECIDING = ("DefaultFlowCallback", "EarlyStoppingCallback")


def check_call_alike(
    trainer: Overridable, gang: Gang, call: str, overridden: frozenset[str], resume: Any = None
) -> None:
    """Raise RankMismatchError unless all ranks make the same call, with the same arguments, data sizes and model.
    Collective. `overridden` are methods that a script replaced: each rank may hold a part of the data that its own
    loaders read.
    """
    if gang.size == 1:
        return
    resume = "a path" if isinstance(resume, str | os.PathLike) and resume != "auto" else resume
    own_training, own_evaluation = "get_train_dataloader" in overridden, "get_eval_dataloader" in overridden
    present = (type(callback).__name__ for callback in trainer.callback_handler.callbacks)
    facts: dict[str, Any] = {
        "call": call,
        "resume_from_checkpoint": resume,
        **shared_arguments(trainer.args),
        "compute_metrics": _given(trainer.compute_metrics),
        "compute_loss_func": _given(trainer.compute_loss_func),
        "preprocess_logits_for_metrics": _given(trainer.preprocess_logits_for_metrics),
        "train_dataset": _size(trainer.train_dataset, own_training),
        "eval_dataset": _size(trainer.eval_dataset, own_evaluation),
        "overridden methods": sorted(overridden),
        # Windlass's own callbacks that log, evaluate, save or stop decide on every rank without an exchange. The
        # requests of a script's own callbacks are exchanged.
        "callbacks": sorted(name for name in present if name in _DECIDING),
        "model": model_facts(trainer.model),
    }
    check_alike(facts, gang)


def check_plan_alike(gang: Gang, plan: RunPlan) -> None:
    """Raise RankMismatchError unless all ranks resolved the same plan. Collective."""
    facts = asdict(replace(plan, data=replace(plan.data, worker_init=None)))
    for part, names in _OF_THIS_RANK.items():
        for name in names:
            del facts[part][name]
    check_alike({"plan": facts}, gang)


def _size(dataset: Any, own_loader: bool) -> Any:
    """The size of a dataset that Windlass deals to the ranks, each of which must hold all of it."""
    if isinstance(dataset, Mapping):
        return {name: _size(one, own_loader) for name, one in dataset.items()}
    sized = dataset is not None and not own_loader and not is_stream(dataset) and hasattr(dataset, "__len__")
    return f"{len(dataset)} samples" if sized else _given(dataset)


def _given(value: Any) -> str:
    return "none" if value is None else "given"
