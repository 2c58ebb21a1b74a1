"""The arguments of a Trainer, and the plan of its present call."""

from __future__ import annotations

from typing import Any

from windlass.assemble.resolve import resolve_call
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import CallPlan
from windlass.core.errors import ConfigError, Problem
from windlass.core.world import World


class Plans:
    """Owns the arguments of a Trainer, and keeps one plan of them: `train()`, `evaluate()` and `predict()` make it when
    they begin, and use it until they end.

    A script may call a method such as `create_optimizer` outside them, and may assign to arguments at any time, also
    within a call. So `of` makes a new plan if another value was assigned to an argument since. A change inside a value,
    as of an item of a dict, has an effect from the next call on.

    Attributes:
        args: those that the script assigned last.
    """

    args: TrainingArguments

    def __init__(self, world: World) -> None:
        self._world, self._in_backward = world, False
        self._plan: CallPlan | None = None
        self._computing: str | None = None  # the precision of the Accelerator, once it is made
        # What the plan was made of: the arguments and their values, compared by identity.
        self._planned: TrainingArguments | None = None
        self._values: dict[str, Any] = {}

    def begin(self, optimizer: Any = None) -> CallPlan:
        """Make the plan of a call. Raises ConfigError if an argument is wrong, or contradicts the launcher's settings.
        `optimizer`: one that the script made before; None if a run makes it.
        """
        self._in_backward = getattr(optimizer, "in_backward", False)
        self._plan = None
        return self.present

    @property
    def present(self) -> CallPlan:
        """The plan of the present call, or of the present arguments outside a call."""
        return self.of(self.args)

    def of(self, args: TrainingArguments) -> CallPlan:
        """The plan of these arguments: that of the present call, unless an argument was assigned since."""
        plan = self._plan
        if plan is None or args is not self._planned or not self._unchanged(vars(args)):
            plan = resolve_call(args, self._world, self._in_backward)
            if plan.precision.word != (self._computing or plan.precision.word):
                fix = (
                    f"the Trainer was made with mixed precision {self._computing!r}, and its Accelerator computes in "
                    "that: set bf16, fp16 and fp8 before, or make another Trainer"
                )
                raise ConfigError(Problem("args", f"mixed precision {plan.precision.word!r}", fix))
            self._plan, self._planned, self._values = plan, args, dict(vars(args))
        return plan

    def computes_in(self, precision: str) -> None:
        """Hold later plans to the precision of the Accelerator, a word of `mixed_precision`: what runs in it would not
        change with the arguments.
        """
        self._computing = precision

    def _unchanged(self, values: dict[str, Any]) -> bool:
        known = self._values
        return values.keys() == known.keys() and all(values[name] is known[name] for name in known)
