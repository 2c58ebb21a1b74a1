"""What the ranks of a run compare before it starts: a difference would hang it, or train other weights on each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from windlass.config.per_rank import shared_arguments
from windlass.config.plan import RunPlan
from windlass.data.prepare import is_stream
from windlass.dist.alike import check_alike, model_facts, optimizer_facts
from windlass.trainer.base import TrainerBase

# What a plan holds under other names than the arguments that may differ.
_OF_THIS_RANK = {"data": ("workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context",
                          "in_order"), "save": ("output_dir", "host_memory"), "batch": ("rank",),
                 "dist": ("timeout_seconds",)}  # fmt: skip


class AlikeMixin(TrainerBase):
    """Compares ranks. Each check is one exchange of a hash; in a world of one there is none."""

    def _check_call_alike(self, call: str, resume: Any = None) -> None:
        """All ranks make the same call, with the same arguments, data sizes and model. Collective.

        Raises:
            RankMismatchError: they do not.
        """
        if self._gang.size == 1:
            return
        resume = "a path" if isinstance(resume, str | os.PathLike) and resume != "auto" else resume
        facts: dict[str, Any] = {
            "call": call,
            "resume_from_checkpoint": resume,
            **shared_arguments(self.args),
        }
        for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
            facts[name] = _given(getattr(self, name))
        facts["train_dataset"] = self._size_of(self.train_dataset, "get_train_dataloader")
        facts["eval_dataset"] = self._size_of(self.eval_dataset, "get_eval_dataloader")
        facts["overridden methods"] = sorted(self._overridden)
        facts["callbacks"] = self._deciding_callbacks()
        facts["model"] = model_facts(self.model)
        check_alike(facts, self._gang)

    def _check_evaluation_alike(self, call: str) -> None:
        """The same for an evaluation of its own; one in the course of training was compared with the run."""
        if not self.is_in_train:
            self._check_call_alike(call)

    def _check_plan_alike(self, plan: RunPlan) -> None:
        """What was resolved from arguments, data and environment is the same on all ranks. Collective.

        Raises:
            RankMismatchError: it is not.
        """
        facts = asdict(replace(plan, data=replace(plan.data, worker_init=None)))
        for part, names in _OF_THIS_RANK.items():
            for name in names:
                del facts[part][name]
        check_alike({"plan": facts}, self._gang)

    def _check_optimizer_alike(self) -> None:
        """Groups and options of the optimizer are the same on all ranks. Collective.

        Raises:
            RankMismatchError: they are not.
        """
        if self.optimizer is not None:
            check_alike({"optimizer": optimizer_facts(self.optimizer)}, self._gang)

    def _size_of(self, dataset: Any, loader: str) -> Any:
        """Samples of a dataset that Windlass deals to the ranks: each must hold all of it."""
        if isinstance(dataset, Mapping):
            return {name: self._size_of(one, loader) for name, one in dataset.items()}
        if dataset is None or loader in self._overridden:
            return _given(dataset)
        sized = not is_stream(dataset) and hasattr(dataset, "__len__")
        return f"{len(dataset)} samples" if sized else _given(dataset)

    def _deciding_callbacks(self) -> list[str]:
        """Windlass's own callbacks that log, evaluate, save or stop: they decide on every rank without asking the
        others. What a script's own ask for on one rank is exchanged.
        """
        names = ("DefaultFlowCallback", "EarlyStoppingCallback")
        present = (type(callback) for callback in self.callback_handler.callbacks)
        return sorted(kind.__name__ for kind in present if kind.__name__ in names)


def _given(value: Any) -> str:
    return "none" if value is None else "given"
