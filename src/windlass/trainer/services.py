"""The objects that a Trainer keeps from one call to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.engine import TrainerEngine
from windlass.callbacks.handler import CallbackHandler
from windlass.trainer.batch_fitter import BatchFitter
from windlass.trainer.evaluator import Evaluator
from windlass.trainer.loss_policy import LossPolicy
from windlass.trainer.run_events import Events
from windlass.trainer.session import Session


@dataclass(frozen=True, slots=True)
class Services:
    """Each owns one kind of state; `Run` and everything below it get them instead of the Trainer."""

    session: Session
    accelerator: Accelerator
    engine: TrainerEngine
    events: Events
    loss: LossPolicy
    fitter: BatchFitter
    evaluator: Evaluator

    @classmethod
    def open(
        cls,
        session: Session,
        accelerator: Accelerator,
        engine: TrainerEngine,
        args: Callable[[], Any],
        handler: CallbackHandler,
    ) -> Services:
        """Make them.

        Args:
            args: returns the arguments that callbacks are given.
        """
        events = Events(args, session, handler)
        loss, fitter = LossPolicy(session, accelerator), BatchFitter(session)
        return cls(
            session, accelerator, engine, events, loss, fitter, Evaluator(session, events, loss, fitter)
        )
