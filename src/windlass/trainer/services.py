"""The objects that live as long as a Trainer, and the plan of its present call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.engine import TrainerEngine
from windlass.assemble.resolve import resolve_call
from windlass.callbacks.handler import CallbackHandler
from windlass.config.accelerator_config import read
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import CallPlan
from windlass.core.module_state import kept_elsewhere
from windlass.core.world import World
from windlass.precision.check import autocast_context, check_precision
from windlass.trainer.batch_faults import BatchFaults
from windlass.trainer.batch_fitter import BatchFitter
from windlass.trainer.evaluator import Evaluator
from windlass.trainer.loading import EvaluationLoaders
from windlass.trainer.loss_policy import LossPolicy
from windlass.trainer.run_events import Events
from windlass.trainer.session import Session
from windlass.transforms.strategies import spread
from windlass.transforms.strategy import Strategy
from windlass.zero.library import is_divided
from windlass.zero.zero_model import frozen_model


class Plans:
    """Keeps one plan: `train()`, `evaluate()` and `predict()` make it when they begin, and use it until they end.

    A script may call a method such as `create_optimizer` outside them, and may assign to arguments at any time, also
    within a call. So `of` makes a new plan if another value was assigned to an argument since. A change inside a value,
    as of an item of a dict, has an effect from the next call on.
    """

    def __init__(self, world: World) -> None:
        self._world, self._in_backward = world, False
        self._plan: CallPlan | None = None
        # What the plan was made of: the arguments and their values, compared by identity.
        self._args: TrainingArguments | None = None
        self._values: dict[str, Any] = {}

    def begin(self, args: TrainingArguments, optimizer: Any = None) -> CallPlan:
        """Make the plan of a call. Raises ConfigError if an argument is wrong, or contradicts the launcher's settings.
        `optimizer`: one that the script made before; None if a run makes it.
        """
        self._in_backward = getattr(optimizer, "in_backward", False)
        self._plan = None
        return self.of(args)

    def of(self, args: TrainingArguments) -> CallPlan:
        """The plan of these arguments: that of the present call, unless an argument was assigned since."""
        plan = self._plan
        if plan is None or args is not self._args or not self._unchanged(vars(args)):
            plan = resolve_call(args, self._world, self._in_backward)
            self._plan, self._args, self._values = plan, args, dict(vars(args))
        return plan

    def _unchanged(self, values: dict[str, Any]) -> bool:
        known = self._values
        return values.keys() == known.keys() and all(values[name] is known[name] for name in known)


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
        cls, session: Session, plans: Plans, accelerator: Accelerator, engine: TrainerEngine,
        args: Callable[[], TrainingArguments], handler: CallbackHandler
    ) -> Services:  # fmt: skip
        """Make all of them; `args` returns the arguments that callbacks get."""
        events, loss = Events(args, session, handler), LossPolicy(session, accelerator)
        fitter, faults = BatchFitter(session), BatchFaults(session.device)
        evaluator = Evaluator(session, events, loss, faults, fitter)
        loaders = EvaluationLoaders()
        return cls(session, plans, accelerator, engine, events, loss, faults, fitter, evaluator, loaders)


def open_accelerator(
    session: Session, plans: Plans, args: Callable[[], TrainingArguments], owned: Callable[[], Iterable[Any]]
) -> tuple[TrainerEngine, Accelerator]:
    """Return the engine to which runs attach, and the accelerator of a Trainer on it. `owned` returns the Trainer's own
    model, wrapper, optimizer and schedule.
    """
    given = args()
    precision, config = plans.of(given).precision, read(given.accelerator_config)
    check_precision(precision, session.device)
    autocast = autocast_context(precision, session.device)
    engine = TrainerEngine(owned, lambda: plans.of(args()).dist, autocast)
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
