"""The input of resolving besides the arguments: the process, the data, and what a subclass overrides."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.assemble.batch import UpdateSize
from windlass.core.world import World


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a continued run whose updates have another size than before.

    Attributes:
        steps: updates made so far.
        amounts_to: updates of the present size that the data they consumed would make.
    """

    steps: int
    amounts_to: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Measured by the facade, judged by `resolve`.

    Attributes:
        world: this process among the job's.
        groups_per_epoch: updates in one pass over the training data; None for a stream of unknown length.
        has_training_data: there is a training dataset (or an overridden loader).
        has_evaluation_data: there is at least one evaluation set (or an overridden loader).
        overridden: names of Trainer methods that the subclass replaced.
        resumed: what was done before updates changed their size; None where they did not.
        saved_size: the size of updates in the checkpoint that is continued.
        fits: samples of the largest micro-batch that memory holds, where an earlier attempt found out.
    """

    world: World
    groups_per_epoch: int | None
    has_training_data: bool = True
    has_evaluation_data: bool = True
    overridden: frozenset[str] = frozenset()
    resumed: Progress | None = None
    saved_size: UpdateSize | None = None
    fits: int | None = None
