"""The objects that live as long as a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.engine import TrainerEngine
from windlass.assemble.resolve import resolve_parallel, resolve_precision
from windlass.callbacks.handler import CallbackHandler
from windlass.precision.autocast import autocast_context
from windlass.precision.check import check_precision
from windlass.trainer.batch_fitter import BatchFitter
from windlass.trainer.evaluator import Evaluator
from windlass.trainer.inputs import EvaluationLoaders
from windlass.trainer.loss_policy import LossPolicy
from windlass.trainer.run_events import Events
from windlass.trainer.session import Session
from windlass.transforms.strategy import Strategy
from windlass.zero.library import is_divided
from windlass.zero.zero_model import frozen_model


@dataclass(frozen=True, slots=True)
class Services:
    """Each owns one kind of state; `Run` and the objects that it uses get them instead of the Trainer."""

    session: Session
    accelerator: Accelerator
    engine: TrainerEngine
    events: Events
    loss: LossPolicy
    fitter: BatchFitter
    evaluator: Evaluator
    eval_loaders: EvaluationLoaders

    @classmethod
    def open(
        cls, session: Session, accelerator: Accelerator, engine: TrainerEngine, args: Callable[[], Any],
        handler: CallbackHandler,
    ) -> Services:  # fmt: skip
        """Make all of them; `args` returns the arguments that callbacks get."""
        events, loss = Events(args, session, handler), LossPolicy(session, accelerator)
        fitter = BatchFitter(session)
        evaluator = Evaluator(session, events, loss, fitter)
        return cls(session, accelerator, engine, events, loss, fitter, evaluator, EvaluationLoaders())


def open_accelerator(
    session: Session, args: Callable[[], Any], owned: Callable[[], Iterable[Any]]
) -> tuple[TrainerEngine, Accelerator]:
    """Return the engine to which runs attach, and the accelerator of a Trainer on it. `owned` returns the Trainer's own
    model, wrapper, optimizer and schedule.
    """
    given = args()
    precision, config = resolve_precision(given), given.accelerator_config
    check_precision(precision, session.device)
    autocast = autocast_context(precision, session.device)
    engine = TrainerEngine(owned, lambda: resolve_parallel(args(), session.world).dist, autocast)
    accumulation = config.accumulation(given.gradient_accumulation_steps)
    loader = config.loader(given.seed, given.data_seed)
    return engine, Accelerator.of_run(session.gang, session.device, precision, accumulation, loader, engine)


def spread_untrained(
    model: nn.Module, engine: TrainerEngine, session: Session, accelerator: Accelerator
) -> Strategy | None:
    """How a model is evaluated that DeepSpeed has divided while it was built; None: this process has a whole one.
    Collective.
    """
    zero = engine.dist.zero if is_divided(model) else None
    if zero is None:
        return None
    compute = accelerator.state.mixed_precision.replace("no", "fp32")
    return frozen_model(model, zero, compute, session.device, session.gang)
