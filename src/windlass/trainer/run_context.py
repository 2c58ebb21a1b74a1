"""What the parts of a run are given."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.assemble.build import Built
from windlass.config.plan import RunPlan
from windlass.dist.gang import Gang
from windlass.trainer.interruption import Interruption
from windlass.trainer.model_writer import ModelWriter
from windlass.trainer.run_events import Events
from windlass.trainer.services import Services
from windlass.trainer.session import Session


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all parts of one call of `train()` share. Nothing of it is replaced before the call ends, and nothing of it
    refers to the Trainer, which keeps its last run.
    """

    services: Services  # the objects that live as long as the Trainer
    plan: RunPlan  # what the run does
    built: Built  # its executor and its schedule
    files: ModelWriter  # the writer of its model
    interruption: Interruption  # the requests to end it early

    @property
    def session(self) -> Session:
        """This process, its device and the other processes."""
        return self.services.session

    @property
    def all_ranks(self) -> Gang:
        """Every process of the job."""
        return self.services.session.all_ranks

    @property
    def events(self) -> Events:
        """The state, the control flags and the callbacks."""
        return self.services.events

    @property
    def forwards_meet(self) -> bool:
        """True if a forward or a loss of one rank waits for the others, so that all need equal numbers of batches."""
        services = self.services
        meet = services.accelerator.forwards_meet or services.loss.settings.exchanges
        return meet or self.built.executor.strategy.sharded
