"""Loaders, and what happens to a dataset before it reaches one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from windlass.assemble.facts import Facts
from windlass.assemble.resolve import resolve_batch, resolve_data
from windlass.core.errors import DataError
from windlass.core.types import State
from windlass.data.columns import ColumnCollator, select_columns, signature_columns
from windlass.data.dealt_loader import DealtLoader
from windlass.data.foreign_loader import ForeignLoader, loader_length
from windlass.data.group import GroupSource
from windlass.data.loader import Loader
from windlass.data.prepare import build_eval_loader, build_train_loader
from windlass.data.stream_loader import StreamLoader
from windlass.trainer.base import TrainerBase
from windlass.trainer.wrappers import innermost


class InputsMixin(TrainerBase):
    """The `get_*_dataloader` family and its overridable helpers."""

    def get_train_dataloader(self) -> Any:
        """The training loader. Override it to bring any iterable of batches; each rank then iterates its own.

        Raises:
            DataError: there is no training dataset, or it is empty.
        """
        if self.train_dataset is None:
            raise DataError(
                "training needs a train_dataset: pass `train_dataset=` or override `get_train_dataloader`"
            )
        dataset, collate = self._with_used_columns(self.train_dataset, "training")
        sampler = None
        if "_get_train_sampler" in self._overridden:
            older = not inspect.signature(self._get_train_sampler).parameters
            sampler = self._get_train_sampler() if older else self._get_train_sampler(dataset)
        facts = Facts(self._world, None)
        return build_train_loader(
            dataset,
            plan=resolve_data(self.args),
            batch=resolve_batch(self.args, facts),
            collate=collate,
            sampler=sampler,
            measured=self.train_dataset,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of one evaluation set: a dataset, or the name of one of the sets given as `eval_dataset`.

        Raises:
            DataError: there is none, or the name is unknown.
        """
        dataset = self._named_eval_dataset(eval_dataset)
        return self._evaluation_loader(dataset, "evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader that `predict` runs over."""
        return self._evaluation_loader(test_dataset, "test")

    def num_examples(self, dataloader: Any) -> int:
        """How many samples a loader gives, all ranks together; estimated from its length where it has no dataset."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError, NotImplementedError):
            return len(dataloader) * self.args.per_device_train_batch_size * self._world.size

    def get_total_train_batch_size(self, args: Any = None) -> int:
        """Samples of one update: micro-batch, times accumulation, times ranks."""
        return resolve_batch(args or self.args, Facts(self._world, None)).update

    def get_tp_size(self) -> int:
        """Ranks that share one copy of each layer (tensor parallelism is not built yet): 1."""
        return 1

    def get_cp_size(self) -> int:
        """Ranks that share one sequence (context parallelism is not built yet): 1."""
        return 1

    def get_sp_size(self) -> int:
        """Ranks that share one sequence by heads (sequence parallelism is not built yet): 1."""
        return 1

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of training samples as a torch sampler, for overrides; by default the loader orders them."""
        return None

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """The order of evaluation samples as a torch sampler, for overrides; by default they come as they stand."""
        return None

    def _named_eval_dataset(self, eval_dataset: Any) -> Any:
        if isinstance(eval_dataset, str):
            sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
            if eval_dataset not in sets:
                known = ", ".join(sets) or "none: `eval_dataset` is not a dict"
                raise DataError(f"there is no evaluation set named {eval_dataset!r}; known: {known}")
            return sets[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise DataError(
                "evaluation needs an eval_dataset: pass `eval_dataset=` to the Trainer or to evaluate()"
            )
        return dataset

    def _evaluation_loader(self, dataset: Any, what: str) -> Loader:
        dataset, collate = self._with_used_columns(dataset, what)
        sampler = self._get_eval_sampler(dataset) if "_get_eval_sampler" in self._overridden else None
        facts = Facts(self._world, None)
        loader = build_eval_loader(
            dataset,
            plan=resolve_data(self.args),
            batch=resolve_batch(self.args, facts),
            collate=collate,
            sampler=sampler,
        )
        if self._eval_fits is not None and self._eval_fits < loader.batch.micro:
            loader.resize(self._eval_fits, 1)
        return loader

    def _group_source(self, loader: Any, position: State | None = None) -> GroupSource:
        """The loader as the engine takes it: ours as it is, a user's own behind an adapter. Collective.

        Args:
            position: where the run goes on in it; None: at its beginning.
        """
        if isinstance(loader, StreamLoader):
            loader.agree(self._gang, position)
        if isinstance(loader, DealtLoader):
            return loader
        batch = resolve_batch(self.args, Facts(self._world, None))
        lengths = self._gang.gather_objects(loader_length(loader))
        longest = None if None in lengths else max(lengths)
        data = resolve_data(self.args)
        return ForeignLoader(loader, batch, data.seed, longest, start_timeout=data.start_timeout)

    # --- columns ----------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        """Fill `_signature_columns`: what the model's forward takes, and the labels. Override it to add yours."""
        if self._signature_columns is None:
            self._signature_columns = signature_columns(innermost(self.model), self.label_names)

    def _with_used_columns(self, dataset: Any, what: str) -> tuple[Any, Any]:
        """The dataset and the collator, so that only columns the model takes reach it."""
        if not self.args.remove_unused_columns:
            return dataset, self.data_collator
        self._set_signature_columns_if_needed()
        columns = self._signature_columns or []
        if getattr(dataset, "column_names", None) is not None and hasattr(dataset, "remove_columns"):
            return select_columns(dataset, columns, what), self.data_collator
        return dataset, ColumnCollator(self.data_collator, columns, what)


def labels_in_signature(module: nn.Module) -> list[str]:
    """The names under which a model's forward takes labels; `["labels"]` where its signature does not tell.

    Looks through wrappers, which hide the signature of the model that they wrap.
    """
    parameters = inspect.signature(innermost(module).forward).parameters
    found = [name for name in parameters if "label" in name or name in ("start_positions", "end_positions")]
    return found or ["labels"]


def returns_loss_by_default(module: nn.Module) -> bool:
    """Whether the forward returns a loss without labels (a parameter `return_loss` whose default is True)."""
    parameter = inspect.signature(innermost(module).forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True
