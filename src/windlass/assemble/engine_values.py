"""The values of a run in the configuration of DeepSpeed: what each "auto" represents, and what contradicts it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.assemble.batch import update_size
from windlass.assemble.facts import Facts
from windlass.config.deepspeed import ARGUMENTS, SIZES, RunValues, completed, for_engine, in_precision
from windlass.config.parallel import Parallel
from windlass.config.plan import DistPlan, ZeroPlan
from windlass.config.refusal import refuse
from windlass.config.sections.setting import default_of
from windlass.core.errors import Problem

_ADAMW = ("adamw_torch", "adamw_torch_fused")


def with_engine(args: Any, facts: Facts, parallel: Parallel, steps: int) -> DistPlan:
    """How the model is distributed, with the configuration of an engine completed for a run of `steps` updates. Raises
    ConfigError if the configuration contradicts the arguments, or the run is not one that the engine can do.
    """
    zero = parallel.dist.zero
    if zero is None:
        return parallel.dist
    size = facts.size or update_size(args, facts.world.size)[0]
    values = _with_arguments({
        "train_micro_batch_size_per_gpu": size.micro,
        "gradient_accumulation_steps": size.accumulation,
        "train_batch_size": size.samples,
        "gradient_clipping": engine_clipping(args, zero),
        "bf16.enabled": parallel.precision.compute == "bf16",
        "fp16.enabled": parallel.precision.compute == "fp16",
        **_of_optimizer(args),
        **_of_schedule(args, steps),
    })  # fmt: skip
    # Which sizes fit into memory is found as the run goes on.
    left_out = SIZES if args.auto_find_batch_size else ()
    given = {name: value for name, value in zero.config.items() if name not in left_out}
    config, problems = completed(given, zero.origin, RunValues(values, facts.hidden_size))
    refuse([*problems, *_unfit(args, zero)])
    config = in_precision(config, parallel.precision.compute)
    return replace(parallel.dist, zero=replace(zero, config=for_engine(config, size.micro)))


def engine_clipping(args: Any, zero: ZeroPlan | None) -> float:
    """`max_grad_norm`; the number in a configuration of DeepSpeed comes before its default."""
    default = default_of(type(args).__dataclass_fields__["max_grad_norm"])
    given = None if zero is None else zero.config.get("gradient_clipping")
    own: float = args.max_grad_norm
    return given if isinstance(given, int | float) and own == default else own


def engine_schedule(args: Any, zero: ZeroPlan | None, steps: int) -> dict[str, Any] | None:
    """The section of the schedule in a configuration of DeepSpeed, without "auto"; None if there is none."""
    if zero is None or "scheduler" not in zero.config:
        return None
    config, problems = completed(
        {"scheduler": zero.config["scheduler"]},
        zero.origin,
        RunValues(_with_arguments(_of_schedule(args, steps))),
    )
    refuse(problems)
    section: dict[str, Any] = config["scheduler"]
    return section


def _with_arguments(values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    return {path: (value, ARGUMENTS[path]) for path, value in values.items()}


def _of_optimizer(args: Any) -> dict[str, Any]:
    return {
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
    }


def _of_schedule(args: Any, steps: int) -> dict[str, Any]:
    return {
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "scheduler.params.warmup_num_steps": args.get_warmup_steps(steps),
        "scheduler.params.total_num_steps": steps,
    }


def _unfit(args: Any, zero: ZeroPlan) -> list[Problem]:
    found = []
    name = str(getattr(args.optim, "value", args.optim))
    if "optimizer" in zero.config and name not in _ADAMW:
        fix = f"contradicts optim={name!r}; choose one of the two"
        found.append(Problem(f"{zero.origin}.optimizer.type", zero.config["optimizer"].get("type"), fix))
    return found
