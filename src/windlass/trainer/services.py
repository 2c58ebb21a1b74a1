"""The objects that a Trainer keeps from one call to the next."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.accelerator.accelerator import Accelerator
from windlass.trainer.batch_fitter import BatchFitter
from windlass.trainer.evaluator import Evaluator
from windlass.trainer.events import Events
from windlass.trainer.loss_policy import LossPolicy
from windlass.trainer.session import Session


@dataclass(frozen=True, slots=True)
class Services:
    """Each owns one kind of state; `Run` and everything below it get them instead of the Trainer."""

    session: Session
    accelerator: Accelerator
    events: Events
    loss: LossPolicy
    fitter: BatchFitter
    evaluator: Evaluator
