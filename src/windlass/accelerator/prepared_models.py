"""The list of prepared models, which scripts of the old library read and shorten."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from torch import nn

from windlass.core.errors import ConfigError, Problem
from windlass.transforms.strategy import Strategy


class PreparedModels(MutableSequence[nn.Module]):
    """What `prepare` returned for each model. A model that is removed is neither saved nor loaded from then on.

    Args:
        own: the strategies of the prepared models; models are removed here.
        elsewhere: strategies of models that are updated elsewhere (by a Trainer's run); they come first, and stay.
    """

    def __init__(self, own: list[Strategy], elsewhere: Callable[[], Sequence[Strategy]]) -> None:
        self._own, self._elsewhere = own, elsewhere

    @property
    def _strategies(self) -> list[Strategy]:
        return [*self._elsewhere(), *self._own]

    def __len__(self) -> int:
        return len(self._strategies)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._strategies[index]
        return [one.model for one in chosen] if isinstance(chosen, list) else chosen.model

    def __delitem__(self, index: Any) -> None:
        chosen = self._strategies[index]
        for strategy in chosen if isinstance(chosen, list) else [chosen]:
            if strategy not in self._own:
                fix = "it is the model of the Trainer, which saves it"
                raise ConfigError(Problem("_models", type(strategy.module).__name__, fix))
            self._own.remove(strategy)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Keep some of the models; only a slice can be assigned to."""
        values = list(value) if isinstance(index, slice) else [value]
        for model in values:
            if not any(model is known for known in self):
                self._refuse(model)
        for model in self[index] if isinstance(index, slice) else [self[index]]:
            if not any(model is kept for kept in values):
                self.remove(model)

    def insert(self, index: int, value: nn.Module) -> None:
        """Refused: only `prepare` adds a model."""
        self._refuse(value)

    def _refuse(self, model: Any) -> None:
        fix = "is not a prepared model: models are added by prepare(), and can only be removed here"
        raise ConfigError(Problem("_models", type(model).__name__, fix))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))
