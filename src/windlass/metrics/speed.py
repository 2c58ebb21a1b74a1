"""Runtime and throughput of a run."""

from __future__ import annotations

from windlass.core.run_clock import seconds_since


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Return the seconds since `start_time` (a `Moment` or `time.time()`) and the rates of the given counts.

    Returns:
        `{split}_runtime` in seconds (4 digits), `{split}_samples_per_second`, `_steps_per_second` and
        `_tokens_per_second` (3 digits); rates are omitted if no time passed.
    """
    runtime = seconds_since(start_time)
    metrics = {f"{split}_runtime": round(runtime, 4)}
    if runtime <= 0:
        return metrics
    for name, count in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
        if count is not None:
            metrics[f"{split}_{name}_per_second"] = round(count / runtime, 3)
    return metrics
