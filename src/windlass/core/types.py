"""Types that several floors share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from windlass.core.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

# The label of tokens and rows that losses leave out.
IGNORED = -100
# What models of transformers call their cache of keys and values, as an argument and as an output: before version 5.24,
# and since.
CACHES = ("past_key_values", "cache")
# A state is what `checkpoint.codec` can write: tensors, numpy arrays, numbers, strings, None, lists, string-keyed
# maps.
State = dict[str, Any]


@runtime_checkable
class Stateful(Protocol):
    """Whatever must survive a restart."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


# What a report says besides the parts of a loss.
_REPORTED = frozenset({"loss", "grad_norm", "learning_rate", "epoch", "step", "skipped_updates"})


@dataclass(slots=True)
class LossTerms:
    """A loss that the engine normalises exactly: `sum / total weight of the update + aux terms`.

    Args:
        sum: scalar tensor, the *sum* of the losses of this micro-batch's targets.
        weight: what the sum is over (number of targets, or the sum of their weights); a number or scalar tensor.
        aux: named scalar auxiliary terms, each a *mean* over the micro-batch (router balance, regularisers). They are
            weighted by the micro-batch's share of the update's samples, added to the loss, and logged by name.
    """

    sum: Tensor
    weight: Tensor | float
    aux: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_names()

    def check_names(self) -> None:
        """Raise ModelError if a term has the name of something else in reports; called again where terms are taken,
        because `aux` may have been changed.
        """
        taken = _REPORTED & self.aux.keys() if self.aux else None
        if taken:
            raise ModelError(
                f"LossTerms(aux={{{min(taken)!r}: ...}}): reports use that name already; give it another"
            )


class EvalPrediction:
    """What `compute_metrics` receives. Unpacks like a tuple: `logits, labels = prediction`.

    Attributes:
        predictions: numpy array (or a tuple of arrays) of the model's outputs, first axis = samples.
        label_ids: numpy array (or a tuple of arrays) of labels, None where the data has none.
        inputs: what `include_for_metrics=["inputs"]` asks for, else None.
        losses: per-batch losses where `include_for_metrics=["loss"]` asks for them, else None.
        elements: all of them that there are, in this order.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        self.elements = (predictions, label_ids, *(x for x in (inputs, losses) if x is not None))

    def __iter__(self) -> Any:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]

    def __len__(self) -> int:
        return len(self.elements)


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns. `training_loss` is the mean loss over all updates of the run, those before a
    resume included; updates that were skipped do not count."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns; arrays have one row per sample, in the dataset's order."""

    predictions: np.ndarray | tuple[Any, ...]
    label_ids: np.ndarray | tuple[Any, ...] | None
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    """What `Trainer.evaluation_loop` returns."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
    num_samples: int


Collator = Callable[[list[Any]], Any]
