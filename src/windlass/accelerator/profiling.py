"""`accelerator.profile()`: run torch's profiler with the options of `ProfileKwargs`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from windlass.config.loop_options import ProfileKwargs
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.logs import get_logger

logger = get_logger(__name__)


@contextlib.contextmanager
def profile(settings: ProfileKwargs, rank: int = 0) -> Iterator[torch.profiler.profile]:
    """See `Accelerator.profile`."""
    refuse(settings.objections())
    with torch.profiler.profile(
        activities=_activities(settings.activities),
        schedule=_schedule(settings.schedule_option),
        on_trace_ready=settings.on_trace_ready,
        record_shapes=settings.record_shapes,
        profile_memory=settings.profile_memory,
        with_stack=settings.with_stack,
        with_flops=settings.with_flops,
        with_modules=settings.with_modules,
    ) as profiler:
        yield profiler
    # Not after an exception: its trace would end in the middle of a step.
    if settings.output_trace_dir is not None:
        _export(profiler, Path(settings.output_trace_dir) / f"profile_{rank}.json")


def _schedule(phases: Mapping[str, int] | None) -> Callable[[int], torch.profiler.ProfilerAction] | None:
    try:
        return None if phases is None else torch.profiler.schedule(**phases)
    except (TypeError, AssertionError):  # a phase that is missing, or out of range
        fix = (
            "must have wait and warmup of 0 or more, active of 1 or more, and may have repeat and skip_first"
        )
        raise ConfigError(Problem("ProfileKwargs.schedule_option", dict(phases or {}), fix)) from None


def _activities(names: Sequence[str] | None) -> list[ProfilerActivity] | None:
    if names is None:
        return None
    supported = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    present = {activity.name.lower(): activity for activity in supported}
    missing = [name for name in names if name not in present]
    if missing:
        fix = f"this machine supports {', '.join(sorted(present))}; name those, or leave activities out"
        raise ConfigError([Problem("ProfileKwargs.activities", name, fix) for name in missing])
    return [present[name] for name in names]


def _export(profiler: torch.profiler.profile, path: Path) -> None:
    if profiler.profiler is None:
        logger.warning(
            "%s is not written: nothing was recorded, because profiler.step() was never called", path
        )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
