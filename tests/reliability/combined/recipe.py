"""What a combination comes to: the arguments, the model, the data and the loss of a run, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("trainer", "sft", "loop", "dpo")
GLOBAL_BATCH = 12  # samples of a micro-batch over all processes: one, two and three share it evenly


@dataclass
class Recipe:
    """How to train. Features change it; `training.py` carries it out.

    Attributes:
        kind: of KINDS: `Trainer`, `SFTTrainer`, a loop with `Accelerator`, or `DPOTrainer`.
        strategy: alone, ddp, fsdp2, zero1, zero2, zero3, or the names of axes.
        on_processor: whether the processor trains, even beside an accelerator.
        axes: sizes of axes, in the names of `ParallelismConfig`.
        arguments: of `TrainingArguments` and `SFTConfig`; a loop reads those that it has.
        model: plain or llama.
        experts: the model has layers of experts.
        images: the model sees images, which most rows have.
        adapter: a method of peft, or "".
        dtype: of the weights.
        ragged: whether rows have different numbers of targets.
        data: rows, stream or stateful_stream.
        loss: own, or one of `losses.py`.
        average: ema or swa, or "".
        accumulation: micro-batches of an update.
        draws: whether a process draws random numbers of its own, so that two do not equal one.
        tolerance: relative, of losses of two processes against those of one.
        by_hand: relative, of an evaluation against the same computed without the library; None if there is no formula.
    """

    kind: str = "trainer"
    strategy: str = "alone"
    world: int = 1
    on_processor: bool = True
    axes: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    model: str = "plain"
    experts: bool = False
    images: bool = False
    adapter: str = ""
    dtype: str = "float64"
    ragged: bool = True
    data: str = "rows"
    loss: str = "own"
    average: str = ""
    accumulation: int = 1
    dropout: float = 0.0
    draws: bool = False
    tolerance: float = 1e-9
    by_hand: float | None = 1e-6

    @property
    def data_ranks(self) -> int:
        """Processes with different samples."""
        together = [size for name, size in self.axes.items() if not name.startswith(("dp_", "ep_"))]
        return self.world // math.prod(together)

    def approximate(self, tolerance: float, by_hand: float = 0.0) -> None:
        """Rounding is amplified or coarser here: allow as much as this."""
        self.tolerance = max(self.tolerance, tolerance)
        if self.by_hand is not None:
            self.by_hand = max(self.by_hand, by_hand)


@dataclass
class Outcome:
    """What came of a run; everything in it goes through JSON.

    Attributes:
        bits: a hash over weights and optimizer state of each rank.
        rows: what the run logged, but for times.
        instants: at how many instants each rank could have been killed.
        struck: number of the attempt's last update, if it was killed.
        refused: text of the error with which it was refused, or "".
        crashed: what else ended it, or "".
        evaluated: the loss that the library reports at the end.
        reread: the same, of what was saved and read back in the ordinary way, computed by hand; None without a formula.
        seen: what was observed of features on their way, by name.
    """

    bits: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    instants: list[int] = field(default_factory=list)
    killed: bool = False
    refused: str = ""
    crashed: str = ""
    evaluated: float = 0.0
    reread: float | None = None
    seen: dict[str, Any] = field(default_factory=dict)

    def series(self, name: str) -> list[float]:
        """What was logged under this name, in order."""
        return [
            float(row[name]) for row in self.rows if name in row
        ]  # rows have "NaN" and "Infinity" as text


@dataclass(frozen=True)
class Effect:
    """What the check of a feature's effect may look at.

    Attributes:
        value: what was asked for.
        whole: the undisturbed run. without: the same without this feature, if the feature asks for it.
    """

    recipe: Recipe
    value: str
    whole: Outcome
    without: Outcome


@dataclass(frozen=True)
class Feature:
    """One thing that can be asked for.

    Attributes:
        name: in a SPEC.
        values: what may be asked for, as in a SPEC.
        ask: changes a recipe.
        check: raises AssertionError if what was asked for had no effect.
        kinds: ways of training that have it.
        needs: features and values that it is always drawn with.
        apart: features, and those of their values, with which the documentation does not combine it; "*": any.
        compared: whether the check needs a run without the feature.
    """

    name: str
    values: tuple[str, ...]
    ask: Callable[[Recipe, str], None]
    check: Callable[[Effect], None]
    kinds: tuple[str, ...] = KINDS
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    compared: bool = False
