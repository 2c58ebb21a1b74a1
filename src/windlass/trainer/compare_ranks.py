"""Compare the ranks of a run before it starts: a difference would hang it, or train other weights on each rank.

Each check is one exchange of a hash; a world of one exchanges nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from windlass.config.arguments import TrainingArguments, shared_arguments
from windlass.config.plan import RunPlan
from windlass.core.errors import RankMismatchError
from windlass.data.prepare import is_stream
from windlass.data.shown_rows import is_table, shown_rows
from windlass.dist.alike import check_alike, model_facts
from windlass.dist.differences import differences
from windlass.dist.gang import Gang

if TYPE_CHECKING:
    from windlass.trainer.trainer import Trainer

# Fields of a plan that may differ between ranks, under other names than the arguments that may.
_OF_THIS_RANK = {
    "data": (
        "workers",
        "pin_memory",
        "persistent_workers",
        "prefetch_factor",
        "multiprocessing_context",
        "in_order",
    ),
    "save": ("host_memory",),
    "batches": ("rank",),
    "dist": ("timeout_seconds",),
    "reports": ("empty_cache_every",),
}
_DECIDING = ("DefaultFlowCallback", "EarlyStoppingCallback")


def check_call_alike(
    trainer: Trainer, all_ranks: Gang, call: str, overridden: frozenset[str], resume: Any
) -> None:
    """Raise RankMismatchError unless all ranks make the same call, with the same arguments, data sizes and model.
    Collective. `overridden` are methods that a script replaced: each rank may hold a part of the data that its own
    loaders read.
    """
    if all_ranks.size == 1:
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
    check_alike(facts, all_ranks)
    _check_rows(trainer, all_ranks, own_training, own_evaluation)


def _check_rows(trainer: Trainer, all_ranks: Gang, own_training: bool, own_evaluation: bool) -> None:
    """Raise RankMismatchError if ranks hold other rows: what Windlass deals to them must be the same everywhere. Sets
    that a rank cannot read are left to the run, whose error names the sample. Collective.
    """
    evaluation = (
        trainer.eval_dataset if isinstance(trainer.eval_dataset, Mapping) else {"": trainer.eval_dataset}
    )
    sets = {} if own_training else {"train_dataset": trainer.train_dataset}
    sets |= (
        {}
        if own_evaluation
        else {f"eval_dataset.{name}".rstrip("."): one for name, one in evaluation.items()}
    )
    shown = {
        name: _shown_rows(one, trainer.args) for name, one in sets.items() if _is_dealt(one) and len(one)
    }
    everywhere = all_ranks.gather_objects({name: rows for name, rows in shown.items() if rows is not None})
    known = set.intersection(*map(set, everywhere))
    lines = differences([{name: rank[name] for name in sorted(known)} for rank in everywhere])
    if lines:
        raise RankMismatchError(lines)


def _shown_rows(dataset: Any, args: TrainingArguments) -> str | None:
    """A few rows as checksums; None if they are not to be read now, cannot be read, or not alike twice."""
    if args.dataloader_num_workers and not is_table(dataset):
        return None  # what reads them may open files that must not be open before the workers are forked
    if (shown := shown_rows(dataset)) is None:
        return None
    checksums = ", ".join(f"{found:08x}" for _, found in shown)
    return f"rows {[place for place, _ in shown]} with the checksums {checksums}"


def check_plan_alike(all_ranks: Gang, plan: RunPlan) -> None:
    """Raise RankMismatchError unless all ranks resolved the same plan. Collective."""
    facts = asdict(plan)
    for part, names in _OF_THIS_RANK.items():
        for name in names:
            del facts[part][name]
    check_alike({"plan": facts}, all_ranks)


def _size(dataset: Any, own_loader: bool) -> Any:
    """The size of a dataset that Windlass deals to the ranks, each of which must hold all of it."""
    if isinstance(dataset, Mapping):
        return {name: _size(one, own_loader) for name, one in dataset.items()}
    return f"{len(dataset)} samples" if _is_dealt(dataset) and not own_loader else _given(dataset)


def _is_dealt(dataset: Any) -> bool:
    return dataset is not None and not is_stream(dataset) and hasattr(dataset, "__len__")


def _given(value: Any) -> str:
    return "none" if value is None else "given"
