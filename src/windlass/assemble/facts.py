"""The inputs of `resolve_run` besides the arguments and the plan of the call: the data, and what a script overrides."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config.plan import UpdateSize


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a resumed run whose updates have another size than before.

    Attributes:
        steps: updates made so far.
        amounts_to: updates of the current size that the consumed data would make.
    """

    steps: int
    amounts_to: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Trainer measures before `resolve_run` checks it.

    Attributes:
        groups_per_epoch: updates in one pass over the training data; None for a stream of unknown length.
        has_training_data: there is a training dataset, or an overridden loader.
        has_evaluation_data: there is an evaluation dataset, or an overridden loader.
        overridden: names of Trainer methods that the subclass overrides.
        resumed: the progress before updates changed their size; None if they did not.
        size: the size of updates; None: that of the arguments.
        hidden_size: width of the model, as its configuration has it; None if it has none.
    """

    groups_per_epoch: int | None
    has_training_data: bool = True
    has_evaluation_data: bool = True
    overridden: frozenset[str] = frozenset()
    resumed: Progress | None = None
    size: UpdateSize | None = None
    hidden_size: int | None = None
