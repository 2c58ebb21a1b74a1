"""The values of a run in the configuration of DeepSpeed: what each "auto" represents, and what contradicts it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.config.arguments import TrainingArguments
from windlass.config.deepspeed import ARGUMENTS, SIZES, RunValues, completed, for_engine, in_precision
from windlass.config.plan import CallPlan, DistPlan, DurationPlan, OptimizerPlan, UpdateSize, ZeroPlan
from windlass.config.sections.setting import default_of
from windlass.core.errors import Problem, refuse

_ADAMW = ("adamw_torch", "adamw_torch_fused")


def with_engine(
    args: TrainingArguments, plan: CallPlan, size: UpdateSize, duration: DurationPlan, width: int | None
) -> DistPlan:
    """How the model is distributed, with the configuration of an engine completed for a run of this duration. Raises
    ConfigError if the configuration contradicts the arguments, or the run is not one that the engine can do.

    Args:
        size: of the updates.
        width: of the model; None if its configuration has none.
    """
    zero, compute = plan.dist.zero, plan.precision.compute
    if zero is None:
        return plan.dist
    values = _with_arguments(
        {
            "train_micro_batch_size_per_gpu": size.micro,
            "gradient_accumulation_steps": size.accumulation,
            "train_batch_size": size.samples,
            "gradient_clipping": engine_clipping(args, zero),
            "bf16.enabled": compute == "bf16",
            "fp16.enabled": compute == "fp16",
            **_of_optimizer(plan.optimizer),
            **_of_schedule(plan, duration.steps, duration.warmup),
        }
    )
    # Which sizes fit into memory is found as the run goes on.
    left_out = SIZES if plan.batches.finds else ()
    given = {name: value for name, value in zero.config.items() if name not in left_out}
    config, problems = completed(given, zero.origin, RunValues(values, width))
    refuse([*problems, *_unfit(plan.optimizer.name, zero)])
    config = in_precision(config, compute)
    return replace(plan.dist, zero=replace(zero, config=for_engine(config, size.micro)))


def engine_clipping(args: TrainingArguments, zero: ZeroPlan | None) -> float:
    """`max_grad_norm`; the number in a configuration of DeepSpeed comes before its default, unless that was given."""
    given = None if zero is None else zero.config.get("gradient_clipping")
    own: float = args.max_grad_norm
    default = default_of(type(args).__dataclass_fields__["max_grad_norm"])
    # Also by value: copies of arguments do not know what was given.
    untouched = own == default and not args.is_given("max_grad_norm")
    return given if isinstance(given, int | float) and untouched else own


def engine_schedule(plan: CallPlan, steps: int, warmup: int) -> dict[str, Any] | None:
    """The section of the schedule in a configuration of DeepSpeed, without "auto"; None if there is none."""
    zero = plan.dist.zero
    if zero is None or "scheduler" not in zero.config:
        return None
    config, problems = completed(
        {"scheduler": zero.config["scheduler"]},
        zero.origin,
        RunValues(_with_arguments(_of_schedule(plan, steps, warmup))),
    )
    refuse(problems)
    section: dict[str, Any] = config["scheduler"]
    return section


def _with_arguments(values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    return {path: (value, ARGUMENTS[path]) for path, value in values.items()}


def _of_optimizer(plan: OptimizerPlan) -> dict[str, Any]:
    return {
        "optimizer.params.lr": plan.learning_rate,
        "optimizer.params.betas": list(plan.betas),
        "optimizer.params.eps": plan.epsilon,
        "optimizer.params.weight_decay": plan.weight_decay,
    }


def _of_schedule(plan: CallPlan, steps: int, warmup: int) -> dict[str, Any]:
    return {
        "scheduler.params.warmup_max_lr": plan.optimizer.learning_rate,
        "scheduler.params.warmup_num_steps": warmup,
        "scheduler.params.total_num_steps": steps,
    }


def _unfit(name: str, zero: ZeroPlan) -> list[Problem]:
    found = []
    if "optimizer" in zero.config and name not in _ADAMW:
        fix = f"contradicts optim={name!r}; choose one of the two"
        found.append(Problem(f"{zero.origin}.optimizer.type", zero.config["optimizer"].get("type"), fix))
    return found
