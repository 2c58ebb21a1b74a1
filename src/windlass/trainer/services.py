"""The objects that live as long as a Trainer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.engine import TrainerEngine
from windlass.callbacks.handler import CallbackHandler
from windlass.config.accelerator_config import read
from windlass.core.module_state import kept_elsewhere
from windlass.data.script_pass import ForScripts
from windlass.precision.check import autocast_context, check_precision
from windlass.trainer.batch_faults import BatchFaults
from windlass.trainer.batch_fitter import BatchFitter
from windlass.trainer.evaluator import Evaluator
from windlass.trainer.loading import EvaluationLoaders
from windlass.trainer.loss_policy import LossPolicy
from windlass.trainer.plans import Plans
from windlass.trainer.run_events import Events
from windlass.trainer.session import Session
from windlass.transforms.strategies import spread
from windlass.transforms.strategy import Strategy
from windlass.zero.library import is_divided
from windlass.zero.zero_model import frozen_model


@dataclass(frozen=True, slots=True)
class Services:
    """The objects that live as long as a Trainer, each with one kind of state. A `Run` gets them, not the Trainer."""

    session: Session
    plans: Plans
    accelerator: Accelerator
    engine: TrainerEngine
    events: Events
    loss: LossPolicy
    faults: BatchFaults
    fitter: BatchFitter
    evaluator: Evaluator
    eval_loaders: EvaluationLoaders

    @classmethod
    def open(
        cls, session: Session, plans: Plans, accelerator: Accelerator, engine: TrainerEngine, handler: CallbackHandler
    ) -> Services:  # fmt: skip
        """Make all of them. None refers to the Trainer, so that it is freed when a script drops it."""
        events, loss = Events(plans, session, handler), LossPolicy(session, accelerator)
        fitter, faults = BatchFitter(session), BatchFaults(session.device)
        evaluator = Evaluator(session, events, loss, faults, fitter)
        loaders = EvaluationLoaders(
            ForScripts(accelerator.gradient_state, session.device, session.data_ranks)
        )
        return cls(session, plans, accelerator, engine, events, loss, faults, fitter, evaluator, loaders)

    def end_run(self) -> None:
        """Drop what they have of a run, however it ended."""
        self.engine.detach()
        self.loss.end_run()
        self.events.end_run()


def open_accelerator(session: Session, plans: Plans) -> tuple[TrainerEngine, Accelerator]:
    """Return the engine to which runs attach, and the accelerator of a Trainer on it."""
    given, precision = plans.args, plans.present.precision
    config = read(given.accelerator_config)
    check_precision(precision, session.device, evaluated_in=plans.present.evaluations.cast)
    plans.computes_in(precision.word)
    autocast = autocast_context(precision, session.device)
    engine = TrainerEngine(lambda: plans.present.dist, autocast)
    accumulation = config.accumulation(given.gradient_accumulation_steps)
    loader = config.loader(given.seed, given.data_seed)
    return engine, Accelerator.of_run(
        session.all_ranks, session.device, precision, accumulation, loader, engine
    )


def spread_in_stages(model: nn.Module, engine: TrainerEngine, session: Session) -> Strategy | None:
    """The strategy for evaluating a model before it is trained by a pipeline; None: there is no pipeline, or the model
    is divided already. Collective.
    """
    dist = engine.dist
    if dist.pipeline is None or kept_elsewhere(model) is not None:
        return None
    strategy = spread(model, dist, session.loss_ranks, session.device)
    # As after a run: rows are whole, and the next one spreads what is divided again.
    strategy.release()
    return strategy


def spread_untrained(
    model: nn.Module, engine: TrainerEngine, session: Session, accelerator: Accelerator
) -> Strategy | None:
    """The strategy for evaluating a model that DeepSpeed divided while it was built; None: this process has all of it.
    Collective.
    """
    zero = engine.dist.zero if is_divided(model) else None
    if zero is None:
        return None
    compute = accelerator.state.mixed_precision.replace("no", "fp32")
    return frozen_model(model, zero, compute, session.device, session.loss_ranks)
