"""The inputs of `resolve_run` besides the arguments and the plan of the call: the data, and what a script overrides."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config.plan import UpdateSize


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a resumed run whose updates have another size than before."""

    steps: int  # updates made so far
    amounts_to: int  # updates of the current size that the consumed data would make


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Trainer measures before `resolve_run` checks it."""

    # Updates in one pass over the training data; None for a stream of unknown length
    groups_per_epoch: int | None
    has_training_data: bool = True  # there is a training dataset, or an overridden loader
    has_evaluation_data: bool = True  # there is an evaluation dataset, or an overridden loader
    overridden: frozenset[str] = frozenset()  # names of Trainer methods that the subclass overrides
    resumed: Progress | None = None  # the progress before updates changed their size; None if they did not
    size: UpdateSize | None = None  # the size of updates; None: that of the arguments
    hidden_size: int | None = None  # width of the model, as its configuration has it; None if it has none
